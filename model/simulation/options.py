"""Options that `longhaul plan` and `longhaul simulate` share."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table

from model.capacity.budget import Budget, budget
from model.capacity.geometry import Geometry
from model.capacity.machine import MACHINES, Machine
from model.profile import load_profile
from model.simulation.node import StoreSettings
from model.simulation.result import POLICIES, Point, Policy, Settings, simulate
from model.simulation.workload import Script, scripts, synthetic
from replay.errors import ReplayError
from replay.selection import load

CONTEXT_TOKENS, OUTPUT_TOKENS, TURNS = 142_000, 444, 65
GAP_S = 10.0
SYNTHETIC_SESSIONS = 64


class PlanError(Exception):
    """What was asked can't be computed; the message names the option and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of machine, workload and sweep."""
    add = parser.add_argument
    add("--hardware", choices=sorted(MACHINES), default="b300-8", help="(default: %(default)s)")
    add("--kv-dtype", choices=("bf16", "fp8"), default="bf16", help="of the KV (default: %(default)s)")
    add("--state-dtype", choices=("fp32", "bf16"), default="fp32", help="of states (default: %(default)s)")
    add("--kv-tokens", type=int, metavar="N", help="KV tokens in HBM (default: by the sizes)")
    add("--state-slots", type=int, metavar="N", help="state slots in HBM (default: by the sizes)")
    add("--host-tokens", type=int, metavar="N", help="KV tokens in host memory (default: by the sizes)")
    add("--host-states", type=int, metavar="N", help="states in host memory (default: by the sizes)")
    add("--prefill", type=float, metavar="TOKENS", help="computed prompt tokens a second")
    add("--decode", type=float, metavar="TOKENS", help="output tokens a second of one request")
    add("--store-gbs", type=float, metavar="GB", help="read from Redis a second, all ranks together")
    add("--store-gb", type=float, default=4000.0, metavar="GB", help="Redis' memory (default: %(default)s)")
    add(
        "--context",
        type=int,
        default=CONTEXT_TOKENS,
        metavar="TOKENS",
        help="mean prompt of made-up sessions (default: %(default)s, InferenceX's mean for K3)",
    )
    add(
        "--output",
        type=int,
        default=OUTPUT_TOKENS,
        metavar="TOKENS",
        help="their answers (default: %(default)s)",
    )
    add("--turns", type=int, default=TURNS, metavar="N", help="their turns (default: %(default)s)")
    add("--gap", type=float, default=GAP_S, metavar="SECONDS", help="mean gap (default: %(default)s)")
    add("--idle-cap", type=float, default=300.0, metavar="SECONDS", help="longest gap (default: %(default)s)")
    add(
        "--answers",
        choices=("discarded", "continued"),
        default="discarded",
        help="whether turns go on from recorded text, as replays do, or from what was generated "
        "(default: %(default)s)",
    )
    add(
        "--start-spacing",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="mean time between the starts of sessions (default: %(default)s; 0: all at once)",
    )
    add("--requests", type=int, default=3000, metavar="N", help="measured a point (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of tables")


def machine_and_budget(args: argparse.Namespace) -> tuple[Machine, Budget]:
    """The machine with the options' rates, and its budget. Raises PlanError for a number out of range."""
    for name in (
        "kv_tokens",
        "state_slots",
        "host_tokens",
        "host_states",
        "prefill",
        "decode",
        "store_gbs",
        "requests",
        "turns",
        "context",
    ):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise PlanError(f"--{name.replace('_', '-')}: must be over 0, is {value}")
    machine = MACHINES[args.hardware]
    rates = {
        "prefill_tokens_s": args.prefill,
        "decode_tokens_s": args.decode,
        "store_bytes_s": args.store_gbs and args.store_gbs * 1e9,
    }
    given = {name: value for name, value in rates.items() if value}
    left = tuple(name for name in machine.assumed if name not in given)
    machine = dataclasses.replace(machine, **given, assumed=left)
    found = budget(
        machine,
        load_profile(machine.profile),
        Geometry(),
        kv=args.kv_dtype,
        state=args.state_dtype,
    )
    found = dataclasses.replace(
        found,
        kv_tokens=args.kv_tokens // 64 * 64 if args.kv_tokens else found.kv_tokens,
        state_slots=args.state_slots or found.state_slots,
        host_tokens=args.host_tokens // 64 * 64 if args.host_tokens else found.host_tokens,
        host_states=args.host_states or found.host_states,
    )
    return machine, found


def workload(args: argparse.Namespace, paths: Sequence[Path], found: Budget) -> list[Script]:
    """The scripts of the traces, or of made-up sessions. Raises ReplayError, PlanError."""
    if paths:
        sessions = load(paths)
        if not sessions:
            raise ReplayError(f"no session in {', '.join(map(str, paths))}")
    else:
        sessions = synthetic(SYNTHETIC_SESSIONS, args.context, args.turns, args.output, args.gap, args.seed)
    return scripts(
        sessions,
        args.idle_cap,
        continued=args.answers == "continued",
        chunk_tokens=found.chunk_tokens,
        track_tokens=found.track_tokens,
    )


def settings(args: argparse.Namespace) -> Settings:
    """The settings of a sweep."""
    store = StoreSettings(room_bytes=args.store_gb * 1e9)
    return Settings(args.requests, args.seed, start_spacing_s=args.start_spacing, store=store)


def sweep(
    args: argparse.Namespace,
    machine: Machine,
    found: Budget,
    made: Sequence[Script],
    policies: Sequence[str],
    counts: Sequence[int],
) -> list[Point]:
    """Simulate each policy at each concurrency. Raises PlanError when the machine holds no request."""
    if not found.kv_tokens or not found.running_requests:
        raise PlanError(
            f"--hardware {machine.name}: K3 does not fit, {found.short_bytes / 1e9:.1f} GB a GPU lack: "
            "take more nodes, or give --kv-tokens and --state-slots"
        )
    largest = max(script.peak_tokens for script in made)
    if largest > found.kv_tokens:
        raise PlanError(
            f"the largest request has {largest:,} tokens, the KV has room for {found.kv_tokens:,}: "
            "raise --kv-tokens, take --kv-dtype fp8, or leave that session out"
        )
    points: list[Point] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulate", total=len(policies) * len(counts))
        for policy in policies:
            for count in counts:
                points.append(simulate(machine, found, made, Policy(policy), count, settings(args)))
                progress.advance(task)
    return points


def document(point: Point) -> dict[str, Any]:
    """A point as JSON."""
    values = dataclasses.asdict(point)
    ttft = values.pop("ttft")
    return {**values, "hit_ratio": point.hit_ratio, "ttft_s": {**ttft, "max": ttft.pop("most")}}


def tables(points: Sequence[Point]) -> Group:
    """Points as two tables of 80 columns, a row each: hits and latency, then load."""
    hits = _table("Hits, as shares of prompt tokens, and time to the first token")
    for name in ("hit", "HBM", "host", "Redis", "theory", "turns\nan hour", "TTFT s\np50", "\np90"):
        hits.add_column(name, justify="right")
    load = _table("Load")
    for name in ("com-\nputed", "prefill\nbusy", "KV\nGB/s", "read", "written", "peak\nTB", "waited"):
        load.add_column(name, justify="right")
    load.caption = (
        "KV GB/s: what prefill computes; read, written: GB/s of Redis; peak: what it held; "
        "waited: turns that waited for a place"
    )
    for point in points:
        shares = (point.hit, point.hit_device, point.hit_host, point.hit_store, point.theoretical)
        hits.add_row(
            point.policy,
            str(point.concurrency),
            *(f"{share:.3f}" for share in shares),
            f"{point.turns_per_hour:,.0f}",
            f"{point.ttft.p50:.2f}",
            f"{point.ttft.p90:.1f}",
        )
        load.add_row(
            point.policy,
            str(point.concurrency),
            f"{point.recompute:.3f}",
            f"{point.prefill_busy:.2f}",
            f"{point.prefill_kv_bytes_s / 1e9:.2f}",
            f"{point.store_read_bytes_s / 1e9:.2f}",
            f"{point.store_write_bytes_s / 1e9:.2f}",
            f"{point.store_peak_bytes / 1e12:.2f}",
            f"{point.waited:,}",
        )
    return Group(hits, "", load)


def _table(title: str) -> Table:
    made = Table(
        box=None,
        title=title,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    made.add_column("policy", no_wrap=True)
    made.add_column("live", justify="right")
    return made


def complain(command: str, problem: object) -> None:
    """Say on stderr why a command can't run."""
    print(f"longhaul {command}: {problem}", file=sys.stderr)


def counts(text: str) -> list[int]:
    """Concurrencies from `8,16,32`. Raises argparse.ArgumentTypeError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, is {text!r}") from error
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {min(found)}")
    return found


def policies(text: str) -> list[str]:
    """Policies from `sglang,redis`, or `all`. Raises argparse.ArgumentTypeError."""
    found = list(POLICIES) if text == "all" else text.split(",")
    for name in found:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(POLICIES)}, all")
    return found
