"""Whether turns outlive `kill -9`: of the gateway, the ledger's Redis and the engine, at any moment.

Sessions are played at once through a real gateway, with a ledger in Redis and a stub engine, each a process
of its own, while one of the three is killed at random moments and started again. A client that gets no end of
its answer sends the same turn once more. Afterwards the ledger is read:

- lost_turns: turns whose end a client saw, and which the gateway did not report as unrecorded, that are not
  there, or whose tokens are not those that the engine was sent (the stub's text names its prompt);
- duplicated_turns: keys that are listed twice, and answers that stand twice in one conversation;
- half_turns: keys that are listed without a turn behind them.

    python -m bench.crash --turns 1000
    python -m bench.crash --soak 5 --streams 200

The soak kills nothing: it holds so many streams for so many minutes, and measures the gateway's memory.
Exit status 1 when anything is lost, twice there or half there, or when memory grows.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import psutil

from bench.engines import free_port, note
from bench.local_servers import await_ready, local_gateway, python_server
from bench.raw_client import Answer, RawClient
from bench.stub_engine import MODEL, prompt_digest
from cache_store.ledger import Ledger
from cache_store.servers import RedisServer, Role
from cache_store.turn import Turn
from model.vocabulary import tokenizer_json
from service.processes import HttpService
from service.tenants import DEFAULT_TENANT

CHAT: Final = "/v1/chat/completions"
TURNS: Final = 1000
SESSIONS: Final = 16
SESSION_TURNS: Final = 20
STREAMS: Final = 200
_ANSWER_TOKENS: Final = 40
_ANSWER_TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.1
_KILL_EVERY_S: Final = (0.2, 1.5)
_GROWTH_LIMIT: Final = 1.05
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_FAULTS: Final = (OSError, asyncio.IncompleteReadError, TimeoutError, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Ended:
    """A turn whose end a client saw. `digest` names the prompt that the engine was sent."""

    key: str
    session: str
    digest: str


@dataclass(slots=True)
class Played:
    """What the clients saw."""

    ended: list[Ended] = field(default_factory=list[Ended])
    retries: int = 0
    statuses: Counter[int] = field(default_factory=Counter[int])


@dataclass(slots=True)
class Stack:
    """The three processes."""

    gateway: HttpService
    engine: HttpService
    ledger: RedisServer
    url: str
    # A child dies with the thread that started it: this one stays as long as the stack.
    starter: ThreadPoolExecutor

    @property
    def processes(self) -> tuple[HttpService | RedisServer, ...]:
        """What can be killed."""
        return self.gateway, self.engine, self.ledger


@contextmanager
def stack(scratch: Path, *, delay_ms: float, extra: Sequence[str] = ()) -> Generator[Stack]:
    """Start the three processes, and end them; `extra` are options of the gateway."""
    model = scratch / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(tokenizer_json())
    argv = ["-m", "bench.stub_engine", "--model", str(model), "--tokens", str(_ANSWER_TOKENS)]
    engine, engine_url = python_server(
        "engine", [*argv, "--delay-ms", str(delay_ms)], scratch, port=free_port()
    )
    ledger = RedisServer(Role.LEDGER, scratch / "ledger")
    gateway, url = local_gateway(engine_url, ledger.url, model, scratch, port=free_port(), extra=extra)
    with ExitStack() as held:
        held.callback(ledger.stop)
        ledger.start()
        for service in (engine, gateway):
            held.callback(service.stop)
            service.launch()
            await_ready(service)
        starter = held.enter_context(ThreadPoolExecutor(1))
        yield Stack(gateway, engine, ledger, url, starter)


async def play_session(url: str, name: str, turns: int, played: Played) -> None:
    """One session: each turn is sent until its end is seen."""
    messages: list[dict[str, Any]] = []
    client: RawClient | None = None
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Turn {turn} of {name}."})
        body = {"model": MODEL, "messages": messages, "stream": True, "prompt_cache_key": name}
        while True:
            try:
                client = client or await RawClient.connect(url)
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    answer = await client.post(CHAT, body)
                played.statuses[answer.status] += 1
                if answer.status == 200:
                    text = _text(answer)
                    break
            except _FAULTS:
                if client is not None:
                    await client.close()
                client = None
            played.retries += 1
            await asyncio.sleep(_PAUSE_S)
        digest = _DIGEST.search(text)
        assert digest is not None, "the stub names its prompt"
        played.ended.append(Ended(answer.headers["x-longhaul-turn"], name, digest[0]))
        messages.append({"role": "assistant", "content": text})
    if client is not None:
        await client.close()


def _text(answer: Answer) -> str:
    """The text of a stream. Raises ValueError when it did not come to its end."""
    text, finish = "", None
    for line in answer.body.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        if "error" in event:
            raise ValueError(event["error"]["message"])
        choice = event["choices"][0]
        text += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
    if finish != "stop":
        raise ValueError("the stream has no end")
    return text


async def kill_often(stack: Stack, chance: random.Random, kills: Counter[str]) -> None:
    """Kill one process after the other, for ever."""
    while True:
        await asyncio.sleep(chance.uniform(*_KILL_EVERY_S))
        process = chance.choice(stack.processes)
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kills[process.name] += 1
        await asyncio.get_running_loop().run_in_executor(stack.starter, _restart, process)


def _restart(process: HttpService | RedisServer) -> None:
    process.stop()
    if isinstance(process, RedisServer):
        process.start()
    else:
        process.launch()
        # The gateway is ready only with its engine and its prompts compared; it serves before.
        await_ready(process)


def unrecorded(log: Path) -> set[str]:
    """The turns that the gateway says the ledger did not take."""
    keys: set[str] = set()
    for line in log.read_bytes().splitlines():
        with suppress(orjson.JSONDecodeError):
            entry = orjson.loads(line)
            if entry.get("recorded") is False:
                keys.add(entry["turn"])
    return keys


@dataclass(slots=True)
class Verdict:
    """What the ledger holds, against what the clients saw."""

    lost: int = 0
    duplicated: int = 0
    half: int = 0
    turn_bytes: int = 0


async def judge(ledger_url: str, ended: Sequence[Ended], missing: set[str]) -> Verdict:
    """Read the whole ledger."""
    verdict = Verdict()
    ledger = Ledger(ledger_url, deadline_s=60.0)
    turns: dict[str, Turn] = {}
    for session in {turn.session for turn in ended}:
        for turn in await ledger.session(DEFAULT_TENANT, session):
            turns[turn.key] = turn
    for one in ended:
        if one.key in missing:
            continue
        path = _path(turns, one.key)
        verdict.lost += path is None or prompt_digest(_prompt(path)) != one.digest
        if path is not None:
            digests = [turn.digest for turn in path]
            verdict.duplicated += len(digests) != len(set(digests))
    await ledger.close()
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(ledger_url) as client:
        listed: Any
        async for key in client.scan_iter(match="longhaul:turns:*:[ds]:*", count=1000):
            listed = await client.lrange(key, 0, -1)  # pyright: ignore[reportGeneralTypeIssues]
            keys = [entry[:16].hex() for entry in listed]
            verdict.duplicated += len(keys) - len(set(keys))
            prefix = key.decode().rsplit(":", 2)[0]
            there = await client.exists(*(f"{prefix}:t:{one}" for one in set(keys)))
            verdict.half += len(set(keys)) - there
        sizes = [await client.strlen(f"longhaul:turns:{DEFAULT_TENANT}:t:{key}") for key in turns]
    verdict.turn_bytes = round(statistics.mean(sizes)) if sizes else 0
    return verdict


def _path(turns: dict[str, Turn], key: str) -> list[Turn] | None:
    """The turns from the root to this one; None when one is not there."""
    path: list[Turn] = []
    next_key: str | None = key
    while next_key is not None:
        if (turn := turns.get(next_key)) is None:
            return None
        path.append(turn)
        next_key = turn.parent
    return path[::-1]


def _prompt(path: Sequence[Turn]) -> Sequence[int]:
    tokens = array("I")
    for turn in path[:-1]:
        tokens.extend(turn.tokens())
    tokens.extend(path[-1].prompt)
    return tokens


async def _crash(stack: Stack, turns: int, seed: int) -> tuple[Played, Counter[str]]:
    played, kills = Played(), Counter[str]()
    killing = asyncio.create_task(kill_often(stack, random.Random(seed), kills))
    lanes = [range(lane, -(-turns // SESSION_TURNS), SESSIONS) for lane in range(SESSIONS)]

    async def play(lane: range) -> None:
        for number in lane:
            left = min(SESSION_TURNS, turns - number * SESSION_TURNS)
            await play_session(stack.url, f"session-{number}", left, played)

    try:
        await asyncio.gather(*map(play, lanes))
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    return played, kills


def crash(scratch: Path, turns: int, seed: int) -> dict[str, Any]:
    """Play so many turns among kills, and report."""
    started_at = time.monotonic()
    with stack(scratch, delay_ms=2.0) as processes:
        played, kills = asyncio.run(_crash(processes, turns, seed))
        processes.starter.submit(note, "all is up again").result()  # behind the last restart
        missing = unrecorded(scratch / "gateway.log")
        note(f"kills: {dict(kills)}; retries: {played.retries}; statuses: {dict(played.statuses)}")
        verdict = asyncio.run(judge(processes.ledger.url, played.ended, missing))
    return {
        "turns": len(played.ended),
        "kills": dict(kills),
        "retries": played.retries,
        "unrecorded_turns": sum(turn.key in missing for turn in played.ended),
        "lost_turns": verdict.lost,
        "duplicated_turns": verdict.duplicated,
        "half_turns": verdict.half,
        "bytes_per_turn": verdict.turn_bytes,
        "seconds": time.monotonic() - started_at,
    }


async def _soak(stack: Stack, minutes: float, streams: int) -> tuple[Played, list[float]]:
    played, memory = Played(), list[float]()
    assert stack.gateway.pid is not None
    children = psutil.Process(stack.gateway.pid)
    end = time.monotonic() + 60 * minutes

    async def play(lane: int) -> None:
        number = 0
        while time.monotonic() < end:
            await play_session(stack.url, f"lane-{lane}-{number}", SESSION_TURNS, played)
            number += 1

    async def watch() -> None:
        while True:
            rss = sum(process.memory_info().rss for process in [children, *children.children(recursive=True)])
            memory.append(rss / (1 << 20))
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(play, range(streams)))
    watching.cancel()
    return played, memory


def soak(scratch: Path, minutes: float, streams: int) -> dict[str, Any]:
    """Hold so many streams for so many minutes, and report."""
    # The memory of turns fills up to its bound, and would look like a leak until then.
    with stack(scratch, delay_ms=200.0, extra=["--turn-cache-mib", "2"]) as processes:
        played, memory = asyncio.run(_soak(processes, minutes, streams))
        missing = unrecorded(scratch / "gateway.log")
        verdict = asyncio.run(judge(processes.ledger.url, played.ended, missing))
    quarter = max(1, len(memory) // 4)
    early, late = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return {
        "minutes": minutes,
        "streams": streams,
        "turns": len(played.ended),
        "retries": played.retries,
        "statuses": {str(status): count for status, count in played.statuses.items()},
        "unrecorded_turns": sum(turn.key in missing for turn in played.ended),
        "lost_turns": verdict.lost,
        "duplicated_turns": verdict.duplicated,
        "half_turns": verdict.half,
        "memory_mib_second_quarter": early,
        "memory_mib_last_quarter": late,
        "memory_growth": late / early,
        "memory_mib_each_30_s": [round(value, 1) for value in memory[::30]],
        "bytes_per_turn": verdict.turn_bytes,
    }


def main() -> int:
    """Measure and report; 0 when nothing is lost, twice there or half there, and memory is flat."""
    parser = argparse.ArgumentParser(prog="python -m bench.crash", description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns among kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (%(default)s)")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="hold streams, and kill nothing")
    parser.add_argument("--streams", type=int, default=STREAMS, help="streams at once (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="longhaul-crash-") as folder:
        if args.soak is None:
            report = crash(Path(folder), args.turns, args.seed)
        else:
            report = soak(Path(folder), args.soak, args.streams)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    flat = report.get("memory_growth", 1.0) <= _GROWTH_LIMIT
    bad = report["lost_turns"] or report["duplicated_turns"] or report["half_turns"]
    return 0 if flat and not bad else 1


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title="turns that outlived their processes")
    for name, value in report.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
