"""What happens when more sessions are live than the engine holds: SGLang alone, with Redis, with admission.

The CPU engine with pools for four sessions is replayed 2, 4, 8 and 16 live sessions. SGLang alone is asked
directly; the others through the gateway, over the same engine with a store: `redis` lets every turn in,
`admission` is `longhaul gateway --admission on`. Each cell begins with empty caches, sends the same text and
waits the same gaps. `hit_at_4x` is what admission hits at 16 of what an infinite cache would,
`throughput_vs_sglang_at_4x` how many times SGLang's turns it does in the same time. Exit status 1 unless
these reach 0.9 and 2, and no request failed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import redis
import uvloop
from rich.console import Console
from rich.table import Table

from bench.engines import Engine, note, running_engine
from bench.local_servers import local_gateway, running
from bench.restart import settled
from cache_store.servers import RedisServer, own_servers
from model import tiny
from model.simulation.workload import synthetic
from replay.calibration import measure as calibrated
from replay.client import ChatClient
from replay.layout import Planner
from replay.report import Report, make_report
from replay.run import Replay
from replay.scale import Scale
from replay.schedule import Pace, SystemClock

POOL_SESSIONS: Final = 4
PAGE_TOKENS: Final = 64
# What a running request holds at most (`extra_buffer`: 5), and a session at rest lives from.
STATES_PER_SESSION: Final = 10
OVERSUBSCRIBED: Final = 4 * POOL_SESSIONS
LEAST_SESSIONS: Final = 8
HIT_GOAL: Final = 0.9
THROUGHPUT_GOAL: Final = 2.0
BLOB_BYTES: Final = 2 << 30
SGLANG, REDIS, ADMISSION = "sglang", "redis", "admission"
WAYS: Final = (SGLANG, REDIS, ADMISSION)
ADMISSION_OPTIONS: Final = {REDIS: ("--admission", "off"), ADMISSION: ("--admission", "on")}
WAITED_METRIC: Final = "longhaul_admission_waited_total"


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions whose prompts grow from half of `context` to one and a half, `gap_s` apart on the mean."""

    context: int = 5000
    turns: int = 10
    output: int = 8
    gap_s: float = 0.5
    live: tuple[int, ...] = (2, 4, 8, OVERSUBSCRIBED)

    @property
    def pool_tokens(self) -> int:
        """KV for four sessions at their longest."""
        longest = self.context * 3 // 2 + self.output
        return POOL_SESSIONS * (-(-longest // PAGE_TOKENS) + 1) * PAGE_TOKENS

    @property
    def pools(self) -> list[str]:
        """SGLang's arguments for pools of this size, host memory as large as SGLang makes it by default."""
        return [
            *("--max-total-tokens", str(self.pool_tokens)),
            *("--max-mamba-cache-size", str(POOL_SESSIONS * STATES_PER_SESSION)),
            *("--max-running-requests", str(POOL_SESSIONS)),
        ]


# The other core is for the client, the gateway and Redis; two threads wait for each other where others run.
ENGINE_ENV: Final = {"OMP_NUM_THREADS": "1"}
HOST_POOL: Final = ("--hicache-size", "0", "--hicache-ratio", "2")


@dataclass(frozen=True, slots=True)
class Point:
    """One way at one number of live sessions; tokens by the tier that gave them; times in s."""

    way: str
    live: int
    sessions: int
    turns: int
    errors: int
    hit: float
    theoretical: float
    hit_ratio: float
    device: int
    host: int
    storage: int
    total_s: float
    turns_per_minute: float
    ttft_p50_s: float
    ttft_p90_s: float
    waited: int | None = None


async def play(url: str, model: Path, workload: Workload, live: int) -> Report:
    """Replay the sessions against an endpoint, `live` at once."""
    sessions = synthetic(
        max(live, LEAST_SESSIONS), workload.context, workload.turns, workload.output, workload.gap_s, seed=1
    )
    async with ChatClient(url) as client:
        await client.connect(None)
        words, calibration = await calibrated(client, model, seed=1)
        run = Replay(
            client=client,
            planner=Planner(Scale(), calibration.overhead),
            words=words,
            pace=Pace(),
            clock=SystemClock(),
            concurrency=live,
            seed=live,
            on_record=lambda record: None,
        )
        await run.run(sessions)
    return make_report(run.records)


def point(way: str, live: int, report: Report, waited: int | None) -> Point:
    """The figures of a cell."""
    total = report.total
    # SGLang alone names no tiers, and has one.
    tiers: Mapping[str, int] = total.tiers or {"device": total.cached_tokens or 0}
    hit, theoretical, ttft = total.actual_hit or 0.0, total.theoretical_hit or 0.0, total.ttft
    return Point(
        way=way,
        live=live,
        sessions=len(report.sessions),
        turns=total.turns,
        errors=total.errors,
        hit=round(hit, 4),
        theoretical=round(theoretical, 4),
        hit_ratio=round(hit / theoretical, 4),
        device=tiers.get("device", 0),
        host=tiers.get("host", 0),
        storage=tiers.get("storage", 0),
        total_s=round(report.wall_s, 1),
        turns_per_minute=round(60 * total.turns / report.wall_s, 1),
        ttft_p50_s=round(ttft.p50, 3) if ttft else 0.0,
        ttft_p90_s=round(ttft.p90, 3) if ttft else 0.0,
        waited=waited,
    )


def cell(way: str, live: int, url: str, model: Path, workload: Workload) -> Point:
    """Play one cell, and say what came of it."""
    report = uvloop.run(play(url, model, workload, live))
    waited = None
    if way == ADMISSION:
        waited = waited_turns(url)
    found = point(way, live, report, waited)
    note(
        f"{way}, {live} live: {found.hit:.3f} of {found.theoretical:.3f} hit, {found.turns} turns in "
        f"{found.total_s:.0f} s, TTFT p50 {found.ttft_p50_s:.2f} s, {found.errors} errors"
        + (f" ({report.failures})" if report.failures else "")
    )
    return found


def measure(model: Path, scratch: Path, workload: Workload, ways: Sequence[str]) -> list[Point]:
    """All cells: one engine without a store, one with, empty at the start of each cell."""
    points: list[Point] = []
    if SGLANG in ways:
        note("SGLang alone: booting")
        with running_engine(model, scratch / "alone.log", extra=workload.pools, env=ENGINE_ENV) as engine:
            for live in workload.live:
                engine.flush()
                points.append(cell(SGLANG, live, engine.url, model, workload))
    stored = [way for way in ways if way != SGLANG]
    if not stored:
        return points
    blobs, ledger = own_servers(scratch, blob_bytes=BLOB_BYTES)
    extra = [*workload.pools, *HOST_POOL]
    with ExitStack() as held:
        held.enter_context(blobs)
        held.enter_context(ledger)
        note("with Redis: booting")
        log = scratch / "stored.log"
        engine = held.enter_context(
            running_engine(model, log, store_url=blobs.url, extra=extra, env=ENGINE_ENV)
        )
        for way in stored:
            for live in workload.live:
                empty(engine, blobs)
                options = ["--store", blobs.url, *ADMISSION_OPTIONS[way]]
                service, url = local_gateway(engine.url, ledger.url, model, scratch, extra=options)
                with running(service):
                    points.append(cell(way, live, url, model, workload))
    return points


def empty(engine: Engine, blobs: RedisServer) -> None:
    """Forget everything, in the engine and in Redis, when nothing more is written."""
    client = redis.Redis(unix_socket_path=str(blobs.socket), socket_timeout=30)
    if client.dbsize():
        settled(blobs)
    engine.flush()
    client.flushall()


def waited_turns(url: str) -> int:
    """How many turns waited for a place in the gateway, by its metrics."""
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    lines = [line for line in page.splitlines() if line.startswith(f"{WAITED_METRIC}{{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def conclude(points: Sequence[Point], workload: Workload) -> dict[str, Any]:
    """The report: all cells, and what they say at four times what fits."""
    cells = {(found.way, found.live): found for found in points}
    ours, alone = cells.get((ADMISSION, OVERSUBSCRIBED)), cells.get((SGLANG, OVERSUBSCRIBED))
    stored = cells.get((REDIS, OVERSUBSCRIBED))
    errors = sum(found.errors for found in points)
    hit = ours.hit_ratio if ours else None
    faster = round(ours.turns_per_minute / alone.turns_per_minute, 2) if ours and alone else None
    return {
        "hit_at_4x": hit,
        "throughput_vs_sglang_at_4x": faster,
        "sglang_hit_at_4x": alone.hit_ratio if alone else None,
        "redis_hit_at_4x": stored.hit_ratio if stored else None,
        "redis_throughput_vs_sglang_at_4x": (
            round(stored.turns_per_minute / alone.turns_per_minute, 2) if stored and alone else None
        ),
        "errors": errors,
        "ok": not errors
        and (hit is None or hit >= HIT_GOAL)
        and (faster is None or faster >= THROUGHPUT_GOAL),
        "pool_tokens": workload.pool_tokens,
        "workload": asdict(workload),
        "points": [asdict(found) for found in points],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m bench.thrash", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--quick", action="store_true", help="16 live sessions of 4 turns alone")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(default: all)")
    parser.add_argument("--live", nargs="+", type=int, metavar="N", help="live sessions (2 4 8 16)")
    parser.add_argument("--turns", type=int, metavar="N", help="of a session (default: 10)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and Redis data in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    workload = Workload(turns=4, live=(OVERSUBSCRIBED,)) if args.quick else Workload()
    given = {"live": tuple(args.live) if args.live else None, "turns": args.turns}
    workload = replace(workload, **{name: value for name, value in given.items() if value})
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with ExitStack() as held:
        scratch = args.keep
        if scratch is None:
            scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="longhaul-thrash-")))
        scratch.mkdir(parents=True, exist_ok=True)
        report = conclude(measure(model, scratch, workload, args.ways), workload)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["ok"] else 1


def _show(report: Mapping[str, Any]) -> None:
    table = Table(title=f"four sessions fit in {report['pool_tokens']:,} tokens")
    columns = ("way", "live", "turns", "hit", "of", "device", "host", "storage", "total s", "turns/min")
    for name in (*columns, "TTFT p50", "p90", "waited"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for found in report["points"]:
        table.add_row(
            found["way"],
            *(str(found[name]) for name in ("live", "turns")),
            *(f"{found[name]:.3f}" for name in ("hit", "hit_ratio")),
            *(f"{found[name]:,}" for name in ("device", "host", "storage")),
            *(f"{found[name]:.1f}" for name in ("total_s", "turns_per_minute")),
            *(f"{found[name]:.2f}" for name in ("ttft_p50_s", "ttft_p90_s")),
            "" if found["waited"] is None else str(found["waited"]),
        )
    console = Console()
    console.print(table)
    for name in ("hit_at_4x", "throughput_vs_sglang_at_4x", "sglang_hit_at_4x", "errors"):
        console.print(f"{name}: {report[name]}")


if __name__ == "__main__":
    sys.exit(main())
