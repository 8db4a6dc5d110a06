"""AgentX's own clients against the service, beside our replay of the same trace.

`agentx-harness` and `aiperf`, as published, and `longhaul replay --scenario agentx` run one after the other
against `longhaul serve` with the tiny K3 on this CPU: as many sessions as lanes, each begun at the same share
of its turns, so that all three send the same turns. Compared are the turns that a client and ours both
measured: prompt tokens and cached tokens as the service counts them. `make agentx` installs the clients.

    python -m bench.agentx [TRACE...] [--clients DIR] [--duration S] [--json]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.engines import free_port, note
from model import tiny
from model.simulation.workload import synthetic
from model.state import state_directory
from replay.errors import ReplayError
from replay.selection import load
from replay.trace_command import convert

OURS = "longhaul replay"
# Made-up sessions: mean prompt, output, turns, mean gap in s.
CONTEXT_TOKENS, OUTPUT_TOKENS, TURNS, GAP_S = 1500, 8, 12, 1.0
START_SHARE = 0.3
CLIENT_LIMIT_S = 600
READY_LIMIT_S = 300
Turn = tuple[str, int]


class ClientFailure(RuntimeError):
    """A client that is not installed, or that failed; the message says which, and how its log ends."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the service said of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Compared:
    """A client's measured turns, and those of them that ours measured too (`common`, theirs and ours)."""

    name: str
    turns: int
    common: int
    prompt_tokens: int
    ours_prompt_tokens: int
    largest_difference: int
    completion_tokens: int
    ours_completion_tokens: int
    hit: float
    ours_hit: float
    theoretical: float | None

    @property
    def hit_points(self) -> float:
        """Their hit rate less ours, in points."""
        return 100 * (self.hit - self.ours_hit)


def compare(
    name: str, theirs: Mapping[Turn, Served], ours: Mapping[Turn, Served], theoretical: float | None
) -> Compared:
    """Compare what both measured. Raises ClientFailure when that is nothing."""
    common = sorted(theirs.keys() & ours.keys())
    if not common:
        raise ClientFailure(f"{name} measured {len(theirs)} turns, {OURS} {len(ours)}, and none is the same")
    pairs = [(theirs[turn], ours[turn]) for turn in common]
    prompt, our_prompt = (sum(pair[side].prompt_tokens for pair in pairs) for side in (0, 1))
    return Compared(
        name=name,
        turns=len(theirs),
        common=len(common),
        prompt_tokens=prompt,
        ours_prompt_tokens=our_prompt,
        largest_difference=max((a.prompt_tokens - b.prompt_tokens for a, b in pairs), key=abs),
        completion_tokens=sum(a.completion_tokens for a, _ in pairs),
        ours_completion_tokens=sum(b.completion_tokens for _, b in pairs),
        hit=sum(a.cached_tokens for a, _ in pairs) / prompt,
        ours_hit=sum(b.cached_tokens for _, b in pairs) / our_prompt,
        theoretical=theoretical,
    )


def first_runs(rows: Sequence[tuple[Turn, Served]]) -> dict[Turn, Served]:
    """Each turn's first request: sessions that have ended are run again."""
    found: dict[Turn, Served] = {}
    for turn, served in rows:
        found.setdefault(turn, served)
    return found


def exported(path: Path) -> dict[Turn, Served]:
    """The measured turns of `profile_export.jsonl`, which both clients write a row a request to."""
    rows: list[tuple[int, Turn, Served]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        about, metrics = row["metadata"], row["metrics"]
        if row.get("error") or about["benchmark_phase"] != "profiling" or about.get("agent_depth"):
            continue

        def count(name: str, metrics: Mapping[str, Any] = metrics) -> int:
            return int(metrics.get(name, {"value": 0})["value"])

        served = Served(
            count("usage_prompt_tokens"),
            count("usage_prompt_cache_read_tokens"),
            count("usage_completion_tokens"),
        )
        rows.append((about["request_start_ns"], (about["conversation_id"], about["turn_index"]), served))
    rows.sort(key=lambda row: row[0])
    return first_runs([(turn, served) for _, turn, served in rows])


def replayed(path: Path) -> dict[Turn, Served]:
    """The measured turns of a report of `longhaul replay --output`."""
    rows = json.loads(path.read_text(encoding="utf-8"))["requests"]
    return first_runs(
        [
            (
                (row["session"], row["turn"]),
                Served(row["input_seen"], row["cached_tokens"] or 0, row["output_seen"]),
            )
            for row in sorted(rows, key=lambda row: row["sent_s"])
            if row.get("failure") is None and row["agent"] == "root"
        ]
    )


def theoretical_hit(path: Path) -> float | None:
    """The client's own figure of what an infinite cache would hit, a share."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for name, value in document.items():
        if name.startswith("theoretical_prefix_cache_hit"):
            return float(value["avg"]) / 100
    return None


@contextmanager
def service(model: Path, folder: Path) -> Generator[str]:
    """The URL of `longhaul serve` with a state directory of its own."""
    log = (folder / "serve.log").open("wb")
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "service.cli", "serve", "--json", "--model", str(model)),
            *("--port", str(port), "--engine-port", str(free_port()), "--state-dir", str(folder / "state")),
        ],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("{"):
            tail = (folder / "serve.log").read_text(errors="replace")[-1500:]
            raise ClientFailure(f"the service did not start:\n{tail}")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.wait(READY_LIMIT_S)
        log.close()


def run_client(name: str, argv: Sequence[str], log: Path) -> None:
    """Run a client to its end. Raises ClientFailure."""
    note(f"{name} runs")
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                argv, stdout=output, stderr=subprocess.STDOUT, timeout=CLIENT_LIMIT_S, check=False
            )
        except FileNotFoundError as error:
            raise ClientFailure(f"{argv[0]} is not there: `make agentx` installs it") from error
        except subprocess.TimeoutExpired as error:
            raise ClientFailure(f"{name} did not end within {CLIENT_LIMIT_S} s; its output: {log}") from error
    if done.returncode:
        raise ClientFailure(
            f"{name} ended with status {done.returncode}:\n{log.read_text(errors='replace')[-2500:]}"
        )


def measure(args: argparse.Namespace, model: Path, traces: Path, lanes: int, folder: Path) -> dict[str, Any]:
    """Run the three against one service."""

    def options(url: str, seed: int, out: Path) -> list[str]:
        return [
            *("--url", url, "--endpoint", "/v1/chat/completions", "--model", "kimi-k3"),
            *("--tokenizer", str(model), "--tokenizer-trust-remote-code"),
            *("--concurrency", str(lanes), "--custom-dataset-type", "weka_trace"),
            *("--input-file", str(traces), "--benchmark-duration", str(args.duration)),
            *("--trajectory-start-min-ratio", str(START_SHARE)),
            *("--trajectory-start-max-ratio", str(START_SHARE)),
            *("--random-seed", str(seed), "--unsafe-override", "--ui", "none"),
            *("--artifact-dir", str(out)),
        ]

    scenario = ["--scenario", "inferencex-agentx-mvp", "--endpoint-type", "chat", "--streaming"]
    clients: dict[str, Callable[[str, int, Path], list[str]]] = {
        "agentx-harness": lambda url, seed, out: [
            str(args.clients / "agentx-harness/bin/agentx"),
            "profile",
            *options(url, seed, out),
        ],
        "aiperf": lambda url, seed, out: [
            str(args.clients / "aiperf/bin/aiperf"),
            "profile",
            *options(url, seed, out),
            *scenario,
            "--use-server-token-count",
        ],
    }
    output = folder / "ours.json"
    theirs: dict[str, tuple[dict[Turn, Served], float | None]] = {}
    with service(model, folder) as url:
        for seed, (name, argv) in enumerate(clients.items(), 1):
            out = folder / name
            run_client(name, argv(url, seed, out), folder / f"{name}.log")
            theirs[name] = (
                exported(out / "profile_export.jsonl"),
                theoretical_hit(out / "profile_export_aiperf.json"),
            )
        run_client(
            OURS,
            [
                *(sys.executable, "-m", "service.cli", "replay", str(traces), "--url", url),
                *("--scenario", "agentx", "--start-window", f"{START_SHARE}-{START_SHARE}"),
                *("--scale", "1", "--time-scale", "1", "--concurrency", str(lanes)),
                *("--duration", str(args.duration), "--seed", "0", "--output", str(output)),
            ],
            folder / "ours.log",
        )
    ours = replayed(output)
    total = json.loads(output.read_text(encoding="utf-8"))["total"]
    rows = [compare(name, rows, ours, theory) for name, (rows, theory) in theirs.items()]
    return {
        "lanes": lanes,
        "duration_s": args.duration,
        "ours": {"turns": len(ours), "theoretical": total["theoretical_hit"], "hit": total["actual_hit"]},
        "clients": [{**asdict(row), "hit_points": row.hit_points} for row in rows],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0, or 1 when a client failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.agentx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="(default: made-up sessions)")
    add("--clients", type=Path, default=state_directory() / "agentx", help="where they are installed")
    add("--sessions", type=int, default=3, metavar="N", help="and lanes (default: %(default)s)")
    add("--duration", type=int, default=40, metavar="S", help="measured time (default: %(default)s)")
    add("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    add("--keep", type=Path, metavar="DIR", help="keep what the clients wrote in DIR")
    add("--json", action="store_true")
    args = parser.parse_args(argv)
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    try:
        sessions = (
            load(args.traces, args.sessions)
            if args.traces
            else synthetic(args.sessions, CONTEXT_TOKENS, TURNS, OUTPUT_TOKENS, GAP_S, 0)
        )
    except ReplayError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="lhagentx") as scratch:
        folder: Path = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        convert(sessions, folder / "traces", GAP_S)
        try:
            result = measure(args, model, folder / "traces", len(sessions), folder)
        except ClientFailure as error:
            print(f"bench.agentx: {error}", file=sys.stderr)
            return 1
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _show(result)
    return 0


def _show(result: Mapping[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="turns that both measured: theirs / ours", title_justify="left")
    table.add_column("client")
    for name in ("turns", "prompt tokens", "largest", "output", "hit", "points", "theory"):
        table.add_column(name, justify="right")
    for row in result["clients"]:
        theory = row["theoretical"]
        table.add_row(
            row["name"],
            f"{row['common']} of {row['turns']}",
            f"{row['prompt_tokens']:,} / {row['ours_prompt_tokens']:,}",
            f"{row['largest_difference']:+}",
            f"{row['completion_tokens']:,} / {row['ours_completion_tokens']:,}",
            f"{row['hit']:.3f} / {row['ours_hit']:.3f}",
            f"{row['hit_points']:+.1f}",
            "" if theory is None else f"{theory:.3f} / {result['ours']['theoretical']:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    # The service has a session of its own: only this ends it.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    sys.exit(main())
