"""Whether a session survives its engine: six turns, `kill -9`, a new engine, the next turn from storage.

The session goes through the gateway, with ledger and blob store in Redis servers of their own. Every answer
is compared with the float32 reference model, which has no cache. Then the states in Redis are zeroed, cut
short, swapped and removed, each time with empty caches in the engine: storage must give nothing, and the
answer be the same. Exit status 1 unless all of this holds.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

from bench.engines import Engine, EngineFailure, free_port, note, running_engine
from cache_store.ledger import Ledger
from cache_store.servers import RedisServer, own_servers
from model import tiny
from model.reference import ReferenceModel
from service.stack import GATEWAY_START_TIMEOUT_S, gateway_service
from service.tenants import Tenants

PAGE_TOKENS = 64
# A state is kept on the page grid at the ends of prompts and turns: at most two pages before the end.
SLACK_TOKENS = 2 * PAGE_TOKENS
# Two logits this close may swap places between two orders of the same sum in float32.
NEAR_TIE = 1e-3
TURNS = 6
ANSWER_TOKENS = 24
BLOB_BYTES = 1 << 30
_SETTLED_S = 2.0
_SETTLE_LIMIT_S = 120.0
_REQUEST_TIMEOUT_S = 600.0
_WORDS = ("the", "build", "of", "this", "module", "fails", "when", "a", "test", "reads", "its", "cache")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its turn in the ledger, and where its prompt came from."""

    turn: str
    prompt_tokens: int
    tiers: dict[str, int]
    message: dict[str, Any]


@dataclass(slots=True)
class Verdicts:
    """Answers against the reference."""

    equal: int = 0
    near_ties: int = 0
    wrong: int = 0

    @property
    def holds(self) -> bool:
        """Whether no answer was wrong."""
        return self.wrong == 0


@dataclass(slots=True)
class Session:
    """A conversation through a gateway."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, client: httpx.Client, text: str) -> Reply:
        """One more turn, greedily."""
        self.messages.append({"role": "user", "content": text})
        reply = self.repeat(client)
        self.messages.append(reply.message)
        return reply

    def repeat(self, client: httpx.Client) -> Reply:
        """Ask what was asked last, and keep nothing."""
        body = {
            "model": "kimi-k3",
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "session_id": "restart",
        }
        response = client.post("/v1/chat/completions", json=body)
        if not response.is_success:
            raise EngineFailure(f"the gateway answered {response.status_code}: {response.text[:500]}")
        answer = response.json()
        usage = answer["usage"]
        return Reply(
            response.headers["x-longhaul-turn"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens_details"],
            answer["choices"][0]["message"],
        )


def filler(words: int, seed: int) -> str:
    """Text that is no other turn's."""
    source = random.Random(seed)
    return " ".join(
        source.choice(_WORDS) + source.choice(["", "", ".", f" {source.random()}"]) for _ in range(words)
    )


@contextmanager
def gateway(engine: Engine, ledger: RedisServer, model: Path, log: Path) -> Generator[httpx.Client]:
    """A gateway in front of `engine`, as a client of it."""
    port = free_port()
    service = gateway_service(
        host="127.0.0.1",
        port=port,
        engine_urls=[engine.url],
        ledger_url=ledger.url,
        model=model,
        tenants=None,
        log=log,
    )
    service.launch()
    try:
        end = time.monotonic() + GATEWAY_START_TIMEOUT_S
        while not service.is_ready():
            if service.poll() is not None or time.monotonic() > end:
                raise EngineFailure(
                    f"the gateway did not start; the end of {log}:\n{log.read_text()[-2000:]}"
                )
            time.sleep(0.2)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_TIMEOUT_S) as client:
            yield client
    finally:
        service.stop()


def settled(server: RedisServer) -> int:
    """Wait until the engine writes no more; returns the number of keys."""
    client = redis.Redis(unix_socket_path=str(server.socket), socket_timeout=10)
    end = time.monotonic() + _SETTLE_LIMIT_S
    size, since = -1, time.monotonic()
    while time.monotonic() < end:
        found = client.dbsize()
        if found != size:
            size, since = found, time.monotonic()
        elif found > 0 and time.monotonic() - since > _SETTLED_S:
            return size
        time.sleep(0.1)
    raise EngineFailure(f"the store still changes after {_SETTLE_LIMIT_S:.0f} s, at {size} keys")


class Judge:
    """Compares answers with the reference, from exactly the ids that the ledger recorded."""

    def __init__(self, model: Path, ledger: RedisServer) -> None:
        self._reference = ReferenceModel.load(model)
        self._url = ledger.url
        self._tenant = Tenants.load(None).authenticate(None).name
        self._expected: dict[tuple[int, ...], list[Any]] = {}

    def judge(self, reply: Reply, verdicts: Verdicts) -> None:
        """Count the reply as equal, near tie or wrong."""
        prompt, answer = asyncio.run(self._tokens(reply.turn))
        if len(prompt) != reply.prompt_tokens:
            raise EngineFailure(f"the ledger has {len(prompt)} prompt tokens, usage {reply.prompt_tokens}")
        if prompt not in self._expected:
            self._expected[prompt] = self._reference.greedy(prompt, ANSWER_TOKENS)
        steps = self._expected[prompt]
        parting = next(
            (step for token, step in zip(answer, steps, strict=False) if token != step.token), None
        )
        if parting is None:
            verdicts.equal += 1
        elif parting.gap < NEAR_TIE:
            verdicts.near_ties += 1
        else:
            verdicts.wrong += 1

    async def _tokens(self, key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All tokens before the turn's answer, and the answer's."""
        ledger = Ledger(self._url, deadline_s=10)
        try:
            path: list[Any] = []
            parent: str | None = key
            while parent is not None:
                (turn,) = await ledger.turns(self._tenant, [parent])
                if turn is None:
                    raise EngineFailure(f"the ledger lost turn {parent}")
                path.append(turn)
                parent = turn.parent
        finally:
            await ledger.close()
        last, earlier = path[0], path[:0:-1]
        prompt = [token for turn in earlier for token in turn.tokens()] + list(last.prompt)
        return tuple(prompt), tuple(last.completion)


def damages() -> Mapping[str, Callable[[Sequence[bytes]], list[bytes]]]:
    """Ways to spoil the states in Redis: what all blobs become."""
    return {
        "zeroed": lambda blobs: [bytes(len(blob)) for blob in blobs],
        "payload_zeroed": lambda blobs: [blob[:80] + bytes(len(blob) - 80) for blob in blobs],
        "truncated": lambda blobs: [blob[: len(blob) // 2] for blob in blobs],
        "swapped": lambda blobs: [*blobs[1:], blobs[0]],
        "removed": lambda blobs: [b"" for _ in blobs],
    }


def spoil(
    server: RedisServer, blobs: Mapping[bytes, bytes], change: Callable[[Sequence[bytes]], list[bytes]]
) -> None:
    """Put changed states in the place of all good ones; an empty one is removed."""
    client = redis.Redis(unix_socket_path=str(server.socket), socket_timeout=30)
    for key in client.scan_iter(match="*:mamba:*"):
        client.delete(key)
    for key, blob in zip(blobs, change(list(blobs.values())), strict=True):
        if blob:
            client.set(key, blob, ex=3600)


def states(server: RedisServer) -> dict[bytes, bytes]:
    """All states in Redis."""
    client = redis.Redis(unix_socket_path=str(server.socket), socket_timeout=30)
    found = {key: client.get(key) for key in client.scan_iter(match="*:mamba:*")}
    return {key: blob for key, blob in sorted(found.items()) if isinstance(blob, bytes)}


def measure(model: Path, scratch: Path) -> dict[str, Any]:
    """Play the session, kill, restore, spoil; returns the report."""
    blobs, ledger = own_servers(scratch, blob_bytes=BLOB_BYTES)
    session, verdicts, spoilt = Session(), Verdicts(), Verdicts()
    with blobs, ledger:
        judge = Judge(model, ledger)
        note("first engine: booting")
        with (
            running_engine(model, scratch / "engine-1.log", store_url=blobs.url) as engine,
            gateway(engine, ledger, model, scratch / "gateway-1.log") as client,
        ):
            previous = session.ask(client, filler(200, 0))
            judge.judge(previous, verdicts)
            for turn in range(1, TURNS):
                previous = session.ask(client, filler(40 + 10 * turn, turn))
                judge.judge(previous, verdicts)
                note(f"turn {turn + 1}: {previous.prompt_tokens} tokens, cached {previous.tiers}")
            keys = settled(blobs)
            engine.kill()
        note("second engine: booting")
        started = time.monotonic()
        with (
            running_engine(model, scratch / "engine-2.log", store_url=blobs.url) as engine,
            gateway(engine, ledger, model, scratch / "gateway-2.log") as client,
        ):
            boot_s = time.monotonic() - started
            session.messages.append({"role": "user", "content": filler(60, TURNS)})
            restored = session.repeat(client)
            judge.judge(restored, verdicts)
            note(f"after the restart: {restored.prompt_tokens} tokens, cached {restored.tiers}")
            settled(blobs)
            good = states(blobs)
            cases: dict[str, dict[str, Any]] = {}
            for name, change in [("intact", list), *damages().items()]:
                spoil(blobs, good, change)
                engine.flush()
                tally = Verdicts()
                reply = session.repeat(client)
                judge.judge(reply, tally)
                cases[name] = {"storage_tokens": reply.tiers["storage"], "equal": tally.holds}
                note(f"states {name}: cached {reply.tiers}, {'equal' if tally.holds else 'WRONG'}")
                if name != "intact":
                    spoilt.wrong += tally.wrong
                    spoilt.equal += tally.equal
                    spoilt.near_ties += tally.near_ties
                settled(blobs)
    required = previous.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS - SLACK_TOKENS
    return {
        "restored_tokens": restored.tiers["storage"],
        "previous_prompt_tokens": previous.prompt_tokens,
        "required_tokens": required,
        "next_prompt_tokens": restored.prompt_tokens,
        "equal": verdicts.holds,
        "near_ties": verdicts.near_ties + spoilt.near_ties,
        "corrupt_equal": spoilt.holds
        and all(case["storage_tokens"] == 0 for name, case in cases.items() if name != "intact"),
        "states": cases,
        "keys_stored": keys,
        "states_stored": len(good),
        "restart_s": round(boot_s, 1),
    }


def main() -> int:
    """Measure and report; 0 when the session survived and nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.restart", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and Redis data in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with _scratch(args.keep) as scratch:
        report = measure(model, scratch)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    survived = report["restored_tokens"] >= report["required_tokens"]
    return 0 if survived and report["equal"] and report["corrupt_equal"] else 1


@contextmanager
def _scratch(keep: Path | None) -> Generator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="longhaul-restart-") as folder:
        yield Path(folder)


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", title="a session across kill -9 of its engine")
    for name, value in report.items():
        if name != "states":
            table.add_row(name, str(value))
    for name, case in report["states"].items():
        table.add_row(
            f"states {name}", f"{case['storage_tokens']} tokens from storage, equal: {case['equal']}"
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
