"""The simulator against the engine: hit rates of a replay on small pools, measured and simulated.

Boots the CPU engine with little room for KV and states, replays the same sessions at several concurrencies,
each with an empty cache, simulates them with the same pools, and compares the share of prompt tokens that was
found. Prefill and decoding are simulated as fast as they were in the replay: this machine's speed is not what
is compared. Simulated are the whole, and the tiers alone, each request at the times it had in the replay.

Where the cache tips, a little in the times decides which sessions find theirs: replays of the same differ by
several points. So means are compared: of a few replays, and of simulations with rates drawn around theirs.

    python -m bench.simulator [TRACE...] [--concurrency 3,5,8] [--kv-tokens N] [--state-slots N] [--json]
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from bench.engines import note, running_engine
from bench.redis_process import RedisProcess
from bench.replay_rates import Rates
from model import tiny
from model.capacity.budget import Budget
from model.capacity.machine import MACHINES, Machine
from model.profile import load_profile
from model.simulation import options
from model.simulation.events import Events
from model.simulation.node import Node, StoreSettings
from model.simulation.node import Request as SimulatedRequest
from model.simulation.result import Point, Policy, Settings, simulate
from model.simulation.workload import scripts, synthetic
from replay.calibration import measure
from replay.client import ChatClient
from replay.errors import ReplayError
from replay.layout import Planner
from replay.record import Record
from replay.report import Report, make_report
from replay.run import Replay
from replay.scale import Scale
from replay.schedule import Pace, SystemClock
from replay.selection import load
from replay.trace import Request, Session

PROFILE = "cpu-tiny"
PAGE_TOKENS = 64
IDLE_CAP_S = 300.0
GOAL_POINTS = 3.0
# Made-up sessions: mean prompt, output, turns, mean gap in s.
CONTEXT_TOKENS, OUTPUT_TOKENS, TURNS, GAP_S = 1500, 8, 8, 0.6
# The host tier of the profile holds everything that these sessions come to.
HOST_TOKENS, HOST_STATES = 2_000_000, 20_000
ONE_GB = 10**9
# Simulations of a replay, each with rates drawn around its own.
DRAWS = 15
# The profile fetches from one page on.
STORE = StoreSettings(least_tokens=PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Compared:
    """One concurrency: shares of prompt tokens that were found, and seconds, on the mean; `replays` each.

    deviation: the standard deviation of the simulated shares.
    """

    concurrency: int
    requests: int
    errors: int
    measured: float
    replays: list[float]
    simulated: float
    deviation: float
    tiers: float
    theoretical: float
    measured_s: float
    simulated_s: float
    rates: list[Rates]

    @property
    def points(self) -> float:
        """Simulated less measured, in points."""
        return 100 * (self.simulated - self.measured)

    @property
    def tier_points(self) -> float:
        """What the tiers alone would have found less measured, in points."""
        return 100 * (self.tiers - self.measured)


def in_pages(session: Session, scale: Scale, time_scale: float) -> Session:
    """The session with scaled token counts and times, its blocks those of the engine's pages."""
    pages: dict[tuple[int, ...], int] = {}

    def shrunk(request: Request) -> Request:
        known = scale.position(len(request.blocks) * session.block_tokens)
        ids: list[int] = []
        for start in range(0, known // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            first = scale.block_at(start, session.block_tokens)
            last = scale.block_at(start + PAGE_TOKENS - 1, session.block_tokens)
            ids.append(pages.setdefault(request.blocks[first : last + 1], len(pages)))
        return Request(
            request.start_s * time_scale,
            request.service_s * time_scale,
            scale.length(request.input_tokens),
            scale.length(request.output_tokens),
            tuple(ids),
        )

    agents = tuple(
        dataclasses.replace(
            agent,
            head_tokens=scale.position(agent.head_tokens),
            requests=tuple(map(shrunk, agent.requests)),
            start_s=agent.start_s * time_scale,
            end_s=agent.end_s * time_scale,
        )
        for agent in session.agents
    )
    return dataclasses.replace(session, block_tokens=PAGE_TOKENS, agents=agents)


async def replayed(
    url: str, model: Path, sessions: Sequence[Session], concurrency: int, idle: float
) -> list[Record]:
    """Replay the sessions, each once and in order."""
    async with ChatClient(url) as client:
        await client.connect(None)
        words, calibration = await measure(client, model, seed := concurrency)
        run = Replay(
            client=client,
            planner=Planner(Scale(), calibration.overhead),
            words=words,
            pace=Pace(1.0, idle),
            clock=SystemClock(),
            concurrency=concurrency,
            seed=seed,
            on_record=lambda record: None,
        )
        await run.run(sessions)
    return run.records


def pools(kv_tokens: int, state_slots: int, running: int, chunk: int, store: bool) -> Budget:
    """The budget of an engine whose pools are given; bytes are those of a small K3 and of no matter."""
    values = {entry.flag: entry.value for entry in load_profile(PROFILE).argument}
    track = values["--mamba-track-interval"]
    assert isinstance(track, int)
    return Budget(
        hbm_bytes=ONE_GB,
        static_bytes=ONE_GB,
        weight_bytes=0,
        short_bytes=0,
        kv_bytes_per_token=1000,
        state_bytes_per_rank=100_000,
        state_bytes=100_000,
        kv_tokens=kv_tokens,
        state_slots=state_slots,
        host_tokens=HOST_TOKENS if store else 0,
        host_states=HOST_STATES if store else 0,
        chunk_tokens=chunk,
        track_tokens=track,
        most_running=running,
    )


def machine(rates: Rates) -> Machine:
    """This machine, as fast as it was in a replay; host memory and Redis are near."""
    return dataclasses.replace(
        MACHINES["b300-8"],
        prefill_tokens_s=rates.prefill,
        decode_tokens_s=rates.decode,
        host_bytes_s=1e9,
        store_bytes_s=1e9,
        request_s=rates.request_s,
    )


def simulated(
    sessions: Sequence[Session], found: Budget, rates: Rates, policy: Policy, concurrency: int, idle: float
) -> Point:
    """Simulate the replay of the sessions."""
    turns = sum(session.turns for session in sessions)
    settings = Settings(turns, once=True, store=STORE)
    made = scripts(sessions, idle, chunk_tokens=found.chunk_tokens, track_tokens=found.track_tokens)
    return simulate(machine(rates), found, made, policy, concurrency, settings)


def tiers_alone(
    sessions: Sequence[Session],
    found: Budget,
    rates: Rates,
    policy: Policy,
    records: Sequence[Record],
    idle: float,
) -> float:
    """The hit rate of the simulated tiers when each request comes and goes as it did in the replay."""
    made = scripts(sessions, idle, chunk_tokens=found.chunk_tokens, track_tokens=found.track_tokens)
    runs = {script.name: (number, script) for number, script in enumerate(made)}
    agents = {
        (session.name, agent.name): index
        for session in sessions
        for index, agent in enumerate(session.agents)
    }
    events = Events()
    node = Node(machine(rates), found, events, STORE if policy.store else None)
    requests: list[SimulatedRequest] = []
    for record in records:
        if record.answer is None:
            continue
        number, script = runs[record.session]
        call = script.conversations[agents[record.session, record.agent]].calls[record.turn]
        request = SimulatedRequest(number, script.tree, call, record.answer.sent_s, lambda request: None)
        request.measured = record.answer.first_token_s, record.answer.end_s
        events.at(record.answer.sent_s, lambda request=request: node.submit(request))
        requests.append(request)
    events.run(lambda: False)
    for tier in node.tiers:
        tier.check_integrity()
    return sum(sum(r.hits) for r in requests) / sum(r.call.input_tokens for r in requests)


def compare(args: argparse.Namespace, sessions: Sequence[Session], folder: Path) -> dict[str, Any]:
    """Boot, replay, simulate."""
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    policy = Policy(args.policy)
    found = pools(args.kv_tokens, args.state_slots, args.running, args.chunk, policy.store)
    idle = IDLE_CAP_S * args.time_scale
    extra = ["--max-total-tokens", str(args.kv_tokens), "--max-mamba-cache-size", str(args.state_slots)]
    extra += ["--max-running-requests", str(args.running), "--chunked-prefill-size", str(args.chunk)]
    rows: list[Compared] = []
    with ExitStack() as stack:
        url = None
        if policy.store:
            server = RedisProcess(folder)
            server.start()
            stack.callback(server.kill)
            url = server.unix_url
        note("the engine boots")
        engine = stack.enter_context(running_engine(model, folder / "engine.log", store_url=url, extra=extra))
        for concurrency in args.concurrency:
            reports: list[Report] = []
            points: list[Point] = []
            rates: list[Rates] = []
            tiers: list[float] = []
            for repeat in range(args.repeats):
                engine.flush()
                records = uvloop.run(replayed(engine.url, model, sessions, concurrency, idle))
                reports.append(make_report(records))
                rates.append(Rates.of(records))
                tiers.append(tiers_alone(sessions, found, rates[-1], policy, records, idle))
                chance = random.Random(f"{concurrency}/{repeat}")
                points += (
                    simulated(sessions, found, rates[-1].drawn(chance), policy, concurrency, idle)
                    for _ in range(DRAWS)
                )
            hits = [report.total.actual_hit for report in reports]
            replays = [hit for hit in hits if hit is not None]
            assert len(replays) == args.repeats, "the engine reports cached tokens"
            row = Compared(
                concurrency=concurrency,
                requests=sum(report.total.turns for report in reports),
                errors=sum(report.total.errors for report in reports),
                measured=mean(replays),
                replays=replays,
                simulated=mean(point.hit for point in points),
                deviation=stdev(point.hit for point in points),
                tiers=mean(tiers),
                theoretical=points[0].theoretical,
                measured_s=mean(report.wall_s for report in reports),
                simulated_s=mean(point.duration_s for point in points),
                rates=rates,
            )
            note(f"{concurrency} live: measured {row.measured:.3f}, simulated {row.simulated:.3f}")
            rows.append(row)
    return {
        "policy": args.policy,
        "sessions": len(sessions),
        "kv_tokens": args.kv_tokens,
        "state_slots": args.state_slots,
        "chunk_tokens": args.chunk,
        "points": [
            {**dataclasses.asdict(row), "difference_points": row.points, "tier_points": row.tier_points}
            for row in rows
        ],
        "max_difference_points": max(abs(row.points) for row in rows),
        "max_tier_points": max(abs(row.tier_points) for row in rows),
        "goal_points": GOAL_POINTS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when all differences are within the goal."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="(default: made-up sessions)")
    add("--concurrency", type=options.counts, default=[3, 5, 8], metavar="N,N", help="(default: 3,5,8)")
    add("--policy", choices=("sglang", "redis"), default="sglang", help="(default: %(default)s)")
    add("--kv-tokens", type=int, default=8192, metavar="N", help="of the pool (default: %(default)s)")
    add("--state-slots", type=int, default=48, metavar="N", help="of the pool (default: %(default)s)")
    add("--running", type=int, default=8, metavar="N", help="most requests at once (default: %(default)s)")
    add("--chunk", type=int, default=512, metavar="TOKENS", help="of prefill (default: %(default)s)")
    add("--scale", type=Scale.parse, default=Scale.parse("1/32"), help="of traces (default: %(default)s)")
    add("--time-scale", type=float, default=1 / 32, help="of traces' gaps (default: 1/32)")
    add("--sessions", type=int, default=10, metavar="N", help="the first N (default: %(default)s)")
    add("--turns", type=int, default=TURNS, metavar="N", help="of each agent (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="N", help="replays each (default: %(default)s)")
    add("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    add("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats: must be at least 1")
    if args.traces:
        try:
            loaded = load(args.traces, args.sessions, args.turns)
        except ReplayError as error:
            parser.error(str(error))
        sessions = [in_pages(session, args.scale, args.time_scale) for session in loaded]
    else:
        args.time_scale = 1.0
        sessions = synthetic(args.sessions, CONTEXT_TOKENS, args.turns, OUTPUT_TOKENS, GAP_S, 0)
    with tempfile.TemporaryDirectory(prefix="lhsim") as folder:
        result = compare(args, sessions, Path(folder))
    if args.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _show(result)
    return 0 if result["max_difference_points"] <= GOAL_POINTS else 1


def _show(result: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    names = ("live", "requests", "measured", "least", "most", "simulated", "±", "points", "tiers", "points")
    for name in (*names, "theory"):
        table.add_column(name, justify="right")
    for row in result["points"]:
        table.add_row(
            str(row["concurrency"]),
            str(row["requests"]),
            f"{row['measured']:.3f}",
            f"{min(row['replays']):.3f}",
            f"{max(row['replays']):.3f}",
            f"{row['simulated']:.3f}",
            f"{row['deviation']:.3f}",
            f"{row['difference_points']:+.1f}",
            f"{row['tiers']:.3f}",
            f"{row['tier_points']:+.1f}",
            f"{row['theoretical']:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
