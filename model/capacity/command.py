"""Plan a K3 deployment: what fits on the hardware, and how many sessions.

Weights, KV and states in HBM by SGLang's rules and the launch profile, host memory and Redis; then, by
simulation, hit rate and recomputation against the number of live sessions, what Redis has to hold and move,
and where SGLang alone breaks down.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from model.capacity.budget import Budget
from model.capacity.machine import Machine
from model.simulation import options
from model.simulation.result import Point
from replay.errors import ReplayError

EXAMPLES = """\
  longhaul plan --hardware b300-8 --trace traces/
  longhaul plan --hardware h200-2x8 --sessions 40 --context 142000 --turns 65
  longhaul plan --hardware b300-8 --kv-dtype fp8 --sessions 64 --json
"""
EXIT_UNUSABLE = 2
POLICIES = ("sglang", "redis")
# Below this share of the theoretical hit rate most prompts are computed again.
BROKEN = 0.5
GRID = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--trace", nargs="+", type=Path, default=[], metavar="PATH", help="trace files or folders"
    )
    which.add_argument("--sessions", type=int, metavar="N", help="live sessions to plan for")
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan and report; 0, or 1 when K3 does not fit, 2 when that can't be computed."""
    try:
        if args.sessions is not None and args.sessions < 1:
            raise options.PlanError(f"--sessions: must be at least 1, is {args.sessions}")
        machine, found = options.machine_and_budget(args)
        fits = bool(found.kv_tokens and found.running_requests)
        points: list[Point] = []
        if fits:
            made = options.workload(args, args.trace, found)
            near = [args.sessions // 2, args.sessions, 2 * args.sessions] if args.sessions else []
            counts = sorted({*GRID, *(count for count in near if count)})
            points = options.sweep(args, machine, found, made, POLICIES, counts)
    except (ReplayError, options.PlanError, OSError) as error:
        options.complain("plan", error)
        return EXIT_UNUSABLE
    limits = {policy: breaks_at(points, policy) for policy in POLICIES}
    if args.json:
        result: dict[str, Any] = {
            "machine": asdict(machine),
            "budget": {**asdict(found), "running_requests": found.running_requests},
            "fits": fits,
            "planned_sessions": args.sessions,
            "breaks_at": limits,
            "points": [options.document(point) for point in points],
        }
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        _print(machine, found, points, limits)
    return 0 if fits else 1


def breaks_at(points: Sequence[Point], policy: str) -> int | None:
    """The first concurrency with less than half of the theoretical hits, None when there is none."""
    broken = [p.concurrency for p in points if p.policy == policy and p.hit_ratio < BROKEN]
    return min(broken, default=None)


def _print(machine: Machine, found: Budget, points: Sequence[Point], limits: dict[str, int | None]) -> None:
    console = Console()
    made = Table(title=f"{machine.name}, {machine.ranks} GPUs", title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("")
    made.add_column("", justify="right")
    gb = 1e9
    for name, value in (
        ("HBM a GPU, GB", f"{found.hbm_bytes / gb:,.0f}"),
        ("weights a GPU, GB", f"{found.weight_bytes / gb:,.1f}"),
        ("KV a token, bytes (all on every GPU)", f"{found.kv_bytes_per_token:,}"),
        ("a state, MB (split over the GPUs)", f"{found.state_bytes / 1e6:,.1f}"),
        ("KV in HBM, tokens", f"{found.kv_tokens:,}"),
        ("states in HBM", f"{found.state_slots:,}"),
        ("requests at once", f"{found.running_requests:,}"),
        ("KV in host memory, tokens", f"{found.host_tokens:,}"),
        ("states in host memory", f"{found.host_states:,}"),
    ):
        made.add_row(name, value)
    console.print(made)
    if not points:
        console.print(f"K3 does not fit: {found.short_bytes / gb:.1f} GB a GPU are lacking", style="red")
        return
    console.print(options.tables(points))
    for policy, limit in limits.items():
        said = "does not break down here" if limit is None else f"breaks down at {limit} live sessions"
        console.print(f"{policy}: {said} (less than half of the theoretical hits)", highlight=False)
    if machine.assumed:
        console.print(f"not measured on this hardware: {', '.join(machine.assumed)}", highlight=False)
