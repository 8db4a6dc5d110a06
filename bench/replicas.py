"""Whether a session outlives its engine: two replicas, the session's own killed with -9, the next turn.

Both serve one checkpoint and one blob store, behind one gateway. The session that is played, killed in its
middle and gone on with must stay with one engine until then, be answered by the other afterwards, with its
prefix from storage, and say what the same session says when it is played again undisturbed. Exit status 1
unless all of this holds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from bench.engines import Engine, free_port, note, running_engines
from bench.local_servers import HOST, await_ready
from bench.restart import BLOB_BYTES, PAGE_TOKENS, SLACK_TOKENS, Reply, Session, filler, settled
from cache_store.servers import own_servers
from model import tiny
from service.stack import gateway_service

TURNS_BEFORE = 4
TURNS_AFTER = 2
_REQUEST_TIMEOUT_S = 600.0


def turns_by_engine(client: httpx.Client) -> tuple[dict[str, int], int]:
    """Turns that each engine began, by its address, and how many of all were not their session's own's."""
    engines: dict[str, int] = {}
    moved = 0
    page = client.get("/metrics").raise_for_status().text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "longhaul_engine_turns_total":
                engines[sample.labels["engine"]] = int(sample.value)
            elif sample.name == "longhaul_moved_turns_total":
                moved = int(sample.value)
    return engines, moved


@contextmanager
def gateway(urls: list[str], ledger_url: str, model: Path, log: Path) -> Generator[httpx.Client]:
    """A gateway in front of engines, as a client of it."""
    port = free_port()
    service = gateway_service(
        host=HOST, port=port, engine_urls=urls, ledger_url=ledger_url, model=model, tenants=None, log=log
    )
    service.launch()
    try:
        await_ready(service)
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=_REQUEST_TIMEOUT_S) as client:
            yield client
    finally:
        service.stop()


def turn_text(turn: int) -> str:
    """What the user says."""
    return filler(200 if turn == 0 else 40 + 10 * turn, turn)


def said(reply: Reply) -> dict[str, Any]:
    """What a reply says, without its ids, and how many tokens it was asked with."""
    calls = [call["function"] for call in reply.message.get("tool_calls") or ()]
    return {**reply.message, "tool_calls": calls, "prompt_tokens": reply.prompt_tokens}


def measure(model: Path, scratch: Path) -> dict[str, Any]:
    """Play a session, kill its engine, go on; play it again on the one that is left; returns the report."""
    blobs, ledger = own_servers(scratch, blob_bytes=BLOB_BYTES)
    with ExitStack() as held:
        held.enter_context(blobs)
        held.enter_context(ledger)
        note("two engines: booting")
        logs = [scratch / "engine-1.log", scratch / "engine-2.log"]
        engines = held.enter_context(running_engines(model, logs, store_url=blobs.url))
        urls = [engine.url for engine in engines]
        client = held.enter_context(gateway(urls, ledger.url, model, scratch / "gateway.log"))
        session, replies = Session(), list[Reply]()
        for turn in range(TURNS_BEFORE):
            replies.append(session.ask(client, turn_text(turn)))
            note(f"turn {turn + 1}: {replies[-1].prompt_tokens} tokens, cached {replies[-1].tiers}")
        before, _ = turns_by_engine(client)
        previous = replies[-1]
        settled(blobs)
        home, other = _by_turns(engines, before)
        home.kill()
        note("its engine is killed")
        started = time.monotonic()
        replies.append(session.ask(client, turn_text(TURNS_BEFORE)))
        moved_s = time.monotonic() - started
        note(f"turn {TURNS_BEFORE + 1}: {replies[-1].prompt_tokens} tokens, cached {replies[-1].tiers}")
        for turn in range(TURNS_BEFORE + 1, TURNS_BEFORE + TURNS_AFTER):
            replies.append(session.ask(client, turn_text(turn)))
            note(f"turn {turn + 1}: {replies[-1].prompt_tokens} tokens, cached {replies[-1].tiers}")
        after, moved = turns_by_engine(client)
        pages = client.get("/metrics").text
        ready = client.get("/ready").json()
        # Undisturbed: nothing cached, nothing stored, nothing continued from the first time.
        settled(blobs)
        other.flush()
        dropped = _flush(blobs.socket) + _flush(ledger.socket)
        note(f"the same session again, undisturbed ({dropped} keys dropped from store and ledger)")
        undisturbed, quiet = Session(), list[Reply]()
        with gateway([other.url], ledger.url, model, scratch / "gateway-2.log") as second:
            for turn in range(TURNS_BEFORE + TURNS_AFTER):
                quiet.append(undisturbed.ask(second, turn_text(turn)))
                note(f"turn {turn + 1}: {quiet[-1].prompt_tokens} tokens, cached {quiet[-1].tiers}")
    restored = replies[TURNS_BEFORE]
    return {
        "moved": moved,
        "stayed": list(before.values()) == [TURNS_BEFORE],
        "turns_by_engine_before": before,
        "turns_by_engine_after": after,
        "restored_tokens": restored.tiers["storage"],
        "previous_prompt_tokens": previous.prompt_tokens,
        "required_tokens": previous.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS - SLACK_TOKENS,
        "next_prompt_tokens": restored.prompt_tokens,
        "moved_turn_s": round(moved_s, 2),
        "equal": [said(reply) for reply in replies] == [said(reply) for reply in quiet],
        "equal_turns": sum(said(a) == said(b) for a, b in zip(replies, quiet, strict=True)),
        "turns": len(replies),
        "engine_series_labelled": f'engine="{other.url.removeprefix("http://")}"' in pages,
        "ready_after": ready["ready"],
        "engines_ready_after": {name: each["ready"] for name, each in ready["engines"].items()},
    }


def _by_turns(engines: list[Engine], turns: Mapping[str, int]) -> tuple[Engine, Engine]:
    """The engine that served the session, and the one that did not."""
    home = max(engines, key=lambda engine: turns.get(engine.url.removeprefix("http://"), 0))
    (other,) = (engine for engine in engines if engine is not home)
    return home, other


def _flush(socket: Path) -> int:
    store = redis.Redis(unix_socket_path=str(socket), socket_timeout=30)
    keys = store.dbsize()
    store.flushall()
    assert isinstance(keys, int)
    return keys


def main() -> int:
    """Measure and report; 0 when the session moved, was restored and said the same."""
    parser = argparse.ArgumentParser(prog="python -m bench.replicas", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and Redis data in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with ExitStack() as held:
        scratch = args.keep
        if scratch is None:
            scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="longhaul-replicas-")))
        scratch.mkdir(parents=True, exist_ok=True)
        report = measure(model, scratch)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    holds = (
        report["stayed"]
        and report["moved"] == TURNS_AFTER
        and report["restored_tokens"] >= report["required_tokens"]
        and report["equal"]
        and report["ready_after"]
    )
    return 0 if holds else 1


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", title="a session whose engine is killed, two replicas")
    for name, value in report.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
