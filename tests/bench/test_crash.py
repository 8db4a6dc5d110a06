import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from bench.crash import Ended, Verdict, judge, unrecorded
from bench.stub_engine import prompt_digest
from cache_store.ledger import Ledger, new_key
from cache_store.servers import RedisServer, Role
from cache_store.turn import DIGEST_BYTES, MARK_BYTES, SHORT_BYTES, Turn
from cache_store.version import Version
from service.tenants import DEFAULT_TENANT

SHORT = bytes(SHORT_BYTES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(Role.LEDGER, tmp_path) as server:
        yield server


async def played(url: str, turns: int = 3) -> list[Ended]:
    """A session of turns in a ledger, and what its client saw."""
    ledger, ended, parent, tokens = Ledger(url), list[Ended](), None, list[int]()
    for number in range(turns):
        prompt = array("I", [number, 7])
        turn = Turn(
            key=new_key(),
            parent=parent,
            session="s",
            digest=bytes([number] * DIGEST_BYTES),
            head=SHORT,
            created_ms=1,
            renewed_ms=1,
            messages=2 * number + 2,
            marks=(bytes(MARK_BYTES),) * 2,
            prompt=prompt,
            tail=(0, 0),
            completion=array("I", [9]),
            closing=array("I"),
            reasoning="",
            calls=(),
            finish="stop",
            highest=9,
            usage=(0,) * 6,
        )
        assert await ledger.append(DEFAULT_TENANT, turn, Version(turn.key, parent, SHORT, SHORT, SHORT))
        tokens += prompt
        ended.append(Ended(turn.key, "s", prompt_digest(tokens)))
        tokens += turn.completion
        parent = turn.key
    await ledger.close()
    return ended


def test_what_is_all_there_is_found(server: RedisServer):
    ended = asyncio.run(played(server.url))
    verdict = asyncio.run(judge(server.url, ended, set()))
    assert (verdict.lost, verdict.duplicated, verdict.half) == (0, 0, 0)
    assert verdict.turn_bytes > 50


def test_what_is_missing_wrong_or_twice_there_is_counted(server: RedisServer):
    ended = asyncio.run(played(server.url))
    prefix = f"longhaul:turns:{DEFAULT_TENANT}"
    client = redis.Redis(unix_socket_path=str(server.socket))
    listed = client.keys(f"{prefix}:d:*")
    assert isinstance(listed, list)
    for name in listed:
        client.lpush(name, client.lindex(name, 0))  # type: ignore[arg-type]
    verdict = asyncio.run(judge(server.url, ended, set()))
    assert (verdict.lost, verdict.duplicated, verdict.half) == (0, 3, 0)
    client.delete(f"{prefix}:t:{ended[-1].key}")
    wrong = [Ended(ended[0].key, "s", "0" * 16), *ended[1:]]
    verdict = asyncio.run(judge(server.url, wrong, set()))
    assert (verdict.lost, verdict.duplicated) == (2, 3)
    assert verdict.half == 2  # in the lists of its digest and of its session
    assert asyncio.run(judge(server.url, wrong, {ended[0].key, ended[-1].key})).lost == 0
    assert isinstance(verdict, Verdict)


def test_the_log_says_what_was_not_recorded(tmp_path: Path):
    log = tmp_path / "gateway.log"
    log.write_text('{"turn":"a","recorded":false}\nTraceback\n{"turn":"b","recorded":true}\n{"turn":"c"}\n')
    assert unrecorded(log) == {"a"}
