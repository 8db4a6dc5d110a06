"""The ledger against a real Redis, and what becomes of it when that stops, hangs, fills or loses data."""

import asyncio
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from cache_store.ledger import (
    SECRET_BYTES,
    SESSION_TURNS_READ,
    VERSIONS_KEPT,
    Ledger,
    LedgerUnavailable,
    new_key,
)
from cache_store.retention import TtlClass
from cache_store.servers import RedisServer, Role
from cache_store.turn import DIGEST_BYTES, MARK_BYTES, SHORT_BYTES, Turn
from cache_store.version import Ancestor, Version


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(Role.LEDGER, tmp_path_factory.mktemp("ledger")) as server:
        yield server


@asynccontextmanager
async def ledger_at(server: RedisServer, **options: float) -> AsyncIterator[Ledger]:
    ledger = Ledger(server.url, **options)  # type: ignore[arg-type]
    try:
        yield ledger
    finally:
        await ledger.close()


@contextmanager
def redis_at(server: RedisServer) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(server.socket))
    try:
        yield client
    finally:
        client.close()


def turn(
    *,
    digest: bytes = bytes(DIGEST_BYTES),
    parent: str | None = None,
    session: str = "",
    ttl: TtlClass | None = None,
) -> Turn:
    return Turn(
        key=new_key(),
        parent=parent,
        session=session,
        digest=digest,
        head=bytes(SHORT_BYTES),
        created_ms=1,
        renewed_ms=1,
        messages=2,
        marks=(bytes(MARK_BYTES),),
        prompt=array("I", [1, 2]),
        tail=(0, 0),
        completion=array("I", [163_000]),
        closing=array("I"),
        reasoning="",
        calls=(),
        finish="stop",
        highest=163_000,
        usage=(0,) * 6,
        ttl=ttl,
    )


def version(turn: Turn) -> Version:
    return Version(turn.key, turn.parent, b"reasonin", b"call ids", b"sessions")


async def test_a_turn_is_found_by_digest_key_and_session(server: RedisServer) -> None:
    tenant, digest = new_key(), os.urandom(DIGEST_BYTES)
    async with ledger_at(server) as ledger:
        parent = turn(session="one")
        child = turn(digest=digest, parent=parent.key, session="one")
        for written in (parent, child):
            assert await ledger.append(tenant, written, version(written))
        nowhere = os.urandom(DIGEST_BYTES)
        assert await ledger.versions(tenant, [digest, nowhere]) == [[version(child)], []]
        assert await ledger.turns(tenant, [child.key, new_key(), parent.key]) == [child, None, parent]
        assert await ledger.session(tenant, "one") == [parent, child]
        assert await ledger.session(tenant, "two") == []


async def test_tenants_do_not_see_each_other(server: RedisServer) -> None:
    written = turn(session="s")
    async with ledger_at(server) as ledger:
        await ledger.append("a", written, version(written))
        for other in ("b", "a:t", "a%3A", "A", ""):
            assert await ledger.turns(other, [written.key]) == [None]
            assert await ledger.versions(other, [written.digest]) == [[]]
            assert await ledger.session(other, "s") == []


async def test_versions_are_newest_first_and_bounded(server: RedisServer) -> None:
    tenant, digest = new_key(), os.urandom(DIGEST_BYTES)
    written = [turn(digest=digest) for _ in range(VERSIONS_KEPT + 3)]
    async with ledger_at(server) as ledger:
        for one in written:
            await ledger.append(tenant, one, version(one))
        [versions] = await ledger.versions(tenant, [digest])
        assert [one.key for one in versions] == [one.key for one in written[:2:-1]]
        assert await ledger.turns(tenant, [written[0].key]) == [written[0]]


async def test_a_session_is_bounded(server: RedisServer) -> None:
    tenant = new_key()
    written = [turn(session="s") for _ in range(SESSION_TURNS_READ + 2)]
    async with ledger_at(server) as ledger:
        for one in written:
            await ledger.append(tenant, one, version(one))
        assert await ledger.session(tenant, "s") == written[2:]


async def test_everything_expires(server: RedisServer) -> None:
    tenant = new_key()
    parent, child = turn(session="s", digest=b"p" * 16), turn(session="s", digest=b"c" * 16)
    async with ledger_at(server, ttl_s=100) as ledger:
        await ledger.append(tenant, parent, version(parent))
        with redis_at(server) as client:
            names = list(client.scan_iter(f"longhaul:turns:{tenant}:*"))
            assert len(names) == 3
            assert all(90 < client.ttl(name) <= 100 for name in names)
            for name in names:
                client.expire(name, 10)
            await ledger.append(tenant, child, version(child), [Ancestor.of(parent)])
            left = [client.ttl(name) for name in client.scan_iter(f"longhaul:turns:{tenant}:*")]
            assert len(left) == 5
            assert all(90 < seconds <= 100 for seconds in left)


async def test_a_turn_is_written_in_one_transaction(server: RedisServer) -> None:
    tenant, written = new_key(), turn(session="s")
    async with ledger_at(server) as ledger:
        assert await ledger.ping()
        with redis_at(server) as client, client.monitor() as monitor:
            assert await ledger.append(tenant, written, version(written))
            commands = [monitor.next_command()["command"].split()[0] for _ in range(12)]
    counted, listed = ["ZADD", "INCRBY", "EXPIRE", "EXPIRE"], ["LPUSH", "LTRIM", "EXPIRE", "RPUSH", "EXPIRE"]
    assert commands == ["MULTI", "SET", *counted, *listed, "EXEC"]


async def test_lookups_take_two_round_trips(server: RedisServer) -> None:
    tenant = new_key()
    async with ledger_at(server) as ledger:
        digests = [os.urandom(DIGEST_BYTES) for _ in range(100)]
        written = [turn(digest=digest) for digest in digests]
        for one in written:
            await ledger.append(tenant, one, version(one))
        with redis_at(server) as client:
            # The server reads a pipeline at once, or in a few pieces of its buffer: never once a command.
            before = client.info("stats")["total_reads_processed"]
            await ledger.versions(tenant, digests)
            await ledger.turns(tenant, [one.key for one in written])
            assert client.info("stats")["total_reads_processed"] - before <= 6


async def test_damaged_entries_are_not_there(server: RedisServer) -> None:
    tenant, digest = new_key(), os.urandom(DIGEST_BYTES)
    one, other = turn(digest=digest), turn(digest=digest)
    async with ledger_at(server) as ledger:
        for written in (one, other):
            await ledger.append(tenant, written, version(written))
        with redis_at(server) as client:
            prefix = f"longhaul:turns:{tenant}:"
            stored = client.get(f"{prefix}t:{one.key}")
            assert isinstance(stored, bytes)
            flipped = bytes((*stored[:40], stored[40] ^ 1, *stored[41:]))
            for damage in (b"", stored[:-1], flipped, b"x" * len(stored)):
                client.set(f"{prefix}t:{one.key}", damage)
                assert await ledger.turns(tenant, [one.key, other.key]) == [None, other]
            client.set(f"{prefix}t:{one.key}", client.get(f"{prefix}t:{other.key}"))  # type: ignore[arg-type]
            assert await ledger.turns(tenant, [one.key]) == [None]
            client.lpush(f"{prefix}d:{digest.hex()}", b"short")
            assert await ledger.versions(tenant, [digest]) == [[version(other), version(one)]]


async def test_a_wrong_type_is_a_fault(server: RedisServer) -> None:
    tenant, digest = new_key(), os.urandom(DIGEST_BYTES)
    written = turn(digest=digest)
    async with ledger_at(server) as ledger:
        with redis_at(server) as client:
            client.set(f"longhaul:turns:{tenant}:d:{digest.hex()}", b"text")
        with pytest.raises(LedgerUnavailable):
            await ledger.versions(tenant, [digest])
        assert not await ledger.append(tenant, written, version(written))
        assert await ledger.ping()


async def test_a_stopped_server_is_a_fault_and_comes_back(tmp_path: Path) -> None:
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with ledger_at(server) as ledger:
            written = turn()
            assert await ledger.append("t", written, version(written))
            server.stop()
            assert not await ledger.ping()
            with pytest.raises(LedgerUnavailable):
                await ledger.turns("t", [written.key])
            with pytest.raises(LedgerUnavailable):
                await ledger.session("t", "s")
            assert not await ledger.append("t", written, version(written))
            server.start()
            assert await ledger.turns("t", [written.key]) == [written]


async def test_an_unreachable_server_is_a_fault_within_the_deadline() -> None:
    ledger = Ledger("redis://203.0.113.1:6379/0", deadline_s=0.2)
    started = time.monotonic()
    with pytest.raises(LedgerUnavailable):
        await ledger.turns("t", [new_key()])
    assert time.monotonic() - started < 1
    await ledger.close()


async def test_a_hanging_server_costs_the_deadline_and_late_replies_are_nobodys(tmp_path: Path) -> None:
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with ledger_at(server, deadline_s=0.2, write_deadline_s=0.3) as ledger:
            written = [turn(digest=os.urandom(DIGEST_BYTES)) for _ in range(20)]
            for one in written:
                assert await ledger.append("t", one, version(one))
            assert server.pid is not None
            for _ in range(3):
                os.kill(server.pid, signal.SIGSTOP)
                started = time.monotonic()
                waiting = [ledger.turns("t", [one.key]) for one in written[:10]]
                failed = await asyncio.gather(*waiting, return_exceptions=True)
                assert all(isinstance(error, LedgerUnavailable) for error in failed)
                assert not await ledger.append("t", written[0], version(written[0]))
                assert time.monotonic() - started < 1.5
                os.kill(server.pid, signal.SIGCONT)
                read = await asyncio.gather(*(ledger.turns("t", [one.key]) for one in written))
                assert read == [[one] for one in written]
                found = await asyncio.gather(*(ledger.versions("t", [one.digest]) for one in written))
                assert [versions[0][0].key for versions in found] == [one.key for one in written]


async def test_a_cancelled_reader_leaves_no_reply_behind(server: RedisServer) -> None:
    tenant = new_key()
    async with ledger_at(server) as ledger:
        written = [turn() for _ in range(8)]
        for one in written:
            await ledger.append(tenant, one, version(one))
        for pause in range(60):
            readers = [asyncio.create_task(ledger.turns(tenant, [one.key])) for one in written]
            for _ in range(pause % 12):
                await asyncio.sleep(0)
            for reader in readers[::2]:
                reader.cancel()
            answers = await asyncio.gather(*readers, return_exceptions=True)
            for one, answer in zip(written, answers, strict=True):
                assert answer == [one] or isinstance(answer, asyncio.CancelledError)


async def test_a_full_server_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with ledger_at(server) as ledger:
            before = turn(session="s")
            assert await ledger.append("t", before, version(before))
            with redis_at(server) as client:
                client.config_set("maxmemory", 1)
                after = turn(session="s")
                assert not await ledger.append("t", after, version(after))
                assert await ledger.turns("t", [before.key, after.key]) == [before, None]
                assert await ledger.session("t", "s") == [before]
                assert [[one.key] for [one] in await ledger.versions("t", [before.digest])] == [[before.key]]
                client.config_set("maxmemory", 0)
            assert await ledger.append("t", after, version(after))


async def test_no_acknowledged_turn_is_lost_nor_half_there_after_kill_9(tmp_path: Path) -> None:
    server = RedisServer(Role.LEDGER, tmp_path)
    acknowledged: list[Turn] = []
    attempted: list[Turn] = []
    for round in range(3):
        server.start()
        try:
            async with ledger_at(server) as ledger:
                pid = server.pid
                assert pid is not None

                async def write(ledger: Ledger = ledger) -> None:
                    while True:
                        one = turn(session="s", digest=os.urandom(DIGEST_BYTES))
                        attempted.append(one)
                        if not await ledger.append("t", one, version(one)):
                            return
                        acknowledged.append(one)

                writers = asyncio.gather(*(write() for _ in range(4)))
                await asyncio.sleep(0.1 + 0.05 * round)
                os.kill(pid, signal.SIGKILL)
                await writers
        finally:
            server.stop()
    assert len(acknowledged) > 50
    server.start()
    try:
        async with ledger_at(server, deadline_s=30.0) as ledger:
            assert await ledger.turns("t", [one.key for one in acknowledged]) == acknowledged
            present = await ledger.turns("t", [one.key for one in attempted])
            digests = await ledger.versions("t", [one.digest for one in attempted])
            for one, there, versions in zip(attempted, present, digests, strict=True):
                assert there in (None, one)
                assert [found.key for found in versions] == ([one.key] if there else [])
            listed = await ledger.session("t", "s")
            complete = sum(one is not None for one in present)
            assert len({one.key for one in listed}) == len(listed) == min(complete, SESSION_TURNS_READ)
    finally:
        server.stop()


async def test_documents_are_kept_beside_turns(server: RedisServer) -> None:
    async with ledger_at(server) as ledger:
        key, other = new_key(), new_key()
        assert await ledger.put_document("a", key, {"text": "é" * 1000})
        assert await ledger.documents("a", [other, key]) == [None, {"text": "é" * 1000}]
        assert await ledger.documents("b", [key]) == [None]
        with redis_at(server) as client:
            name = f"longhaul:turns:a:r:{key}"
            assert 0 < client.ttl(name) <= ledger.ttl_s  # type: ignore[operator]
            client.expire(name, 100)
            assert await ledger.put_document("a", other, {}, path=[key])
            assert client.ttl(name) > 100  # type: ignore[operator]
            stored = client.get(name)
            assert isinstance(stored, bytes)
            client.set(f"longhaul:turns:a:r:{other}", stored)  # of another key
            client.set(name, stored[:-1] + bytes([stored[-1] ^ 1]))
        assert await ledger.documents("a", [key, other]) == [None, None]
        assert await ledger.delete_document("a", key)
        assert not await ledger.delete_document("a", key)


async def test_a_secret_is_made_once(server: RedisServer) -> None:
    async with ledger_at(server) as one, ledger_at(server) as two:
        made = await asyncio.gather(one.secret("x"), two.secret("x"))
        assert made[0] == made[1]
        assert len(made[0]) == SECRET_BYTES
        assert await one.secret("y") != made[0]


def size_of(client: redis.Redis, tenant: str) -> int:
    """What Redis itself says of the tenant's turns and documents."""
    names = [name for kind in "tr" for name in client.scan_iter(f"longhaul:turns:{tenant}:{kind}:*")]
    return sum(client.strlen(name) for name in names)  # type: ignore[misc]


async def test_a_session_is_erased_as_a_whole_and_alone(server: RedisServer) -> None:
    """More turns than are erased or read at once, forks, documents; what others have stays."""
    tenant, other, digest = new_key(), new_key(), os.urandom(DIGEST_BYTES)
    async with ledger_at(server) as ledger:
        mine = [turn(session="mine", digest=digest if n < 9 else os.urandom(16)) for n in range(600)]
        theirs = [turn(session="theirs", digest=digest) for _ in range(3)]
        for one in (*mine, *theirs):
            assert await ledger.append(tenant, one, version(one))
        foreign = turn(session="mine", digest=digest)
        assert await ledger.append(other, foreign, version(foreign))
        for key in (mine[0].key, mine[-1].key, theirs[0].key):
            assert await ledger.put_document(tenant, key, {"text": "x"})
        assert await ledger.erase_session(tenant, "mine") == len(mine)
        assert not {one.key for one in mine} & ledger._decoded._turns.keys()  # pyright: ignore[reportPrivateUsage]
        assert await ledger.session(tenant, "mine") == []
        with redis_at(server) as client:
            names = list(client.scan_iter(f"longhaul:turns:{tenant}:*"))
            held = b"".join(
                b"".join(client.lrange(name, 0, -1))  # type: ignore[arg-type]
                for name in names
                if client.type(name) == b"list"
            )
            for one in mine:
                assert bytes.fromhex(one.key) not in held
                assert not any(one.key.encode() in name for name in names)
            assert await ledger.stored_bytes(tenant) == size_of(client, tenant) > 0
        assert await ledger.session(tenant, "theirs") == theirs
        assert await ledger.documents(tenant, [theirs[0].key]) == [{"text": "x"}]
        assert [one.key for one in (await ledger.versions(tenant, [digest]))[0]] == [
            one.key for one in reversed(theirs)
        ]
        assert await ledger.session(other, "mine") == [foreign]
        assert await ledger.erase_session(tenant, "mine") == 0


async def test_bytes_are_counted_while_they_are_there(server: RedisServer) -> None:
    tenant = new_key()
    async with ledger_at(server, ttl_s=100) as ledger:
        assert await ledger.stored_bytes(tenant) == 0
        expired, renewed, kept = (turn(session="s", digest=os.urandom(16)) for _ in range(3))
        for one in (expired, renewed, kept):
            assert await ledger.append(tenant, one, version(one))
        assert await ledger.put_document(tenant, kept.key, {"text": "x" * 500})
        with redis_at(server) as client:
            assert await ledger.stored_bytes(tenant) == size_of(client, tenant)
            due = f"longhaul:stored:{tenant}:due"
            for name in client.zrange(due, 0, -1):
                client.zadd(due, {name: 1})  # as if all that time had gone by
            client.delete(f"longhaul:turns:{tenant}:t:{expired.key}")
            assert await ledger.stored_bytes(tenant) == size_of(client, tenant)
            assert client.zcard(due) == 3
            assert client.zcount(due, "-inf", 1) == 0
        assert await ledger.delete_document(tenant, kept.key)
        assert not await ledger.delete_document(tenant, kept.key)
        with redis_at(server) as client:
            assert await ledger.stored_bytes(tenant) == size_of(client, tenant)


async def test_each_class_has_its_time(server: RedisServer) -> None:
    tenant = new_key()
    ledger = Ledger(server.url, ttl_s=1000, class_ttl_s={"5m": 500, "1h": 2000})
    written = {ttl: turn(ttl=ttl, session=str(ttl)) for ttl in (None, "5m", "1h", "24h")}
    for one in written.values():
        assert await ledger.append(tenant, one, version(one))
    with redis_at(server) as client:
        prefix = f"longhaul:turns:{tenant}:"
        left = {ttl: client.ttl(f"{prefix}t:{one.key}") for ttl, one in written.items()}
        for ttl, seconds in ((None, 1000), ("5m", 500), ("1h", 2000), ("24h", 1000)):
            assert seconds - 9 < left[ttl] <= seconds
        lists = [name for kind in "ds" for name in client.scan_iter(f"{prefix}{kind}:*")]
        assert len(lists) == 5
        assert all(1990 < client.ttl(name) <= 2000 for name in lists)
        for name in client.scan_iter(f"{prefix}*"):
            client.expire(name, 10)
        child = turn(parent=written["1h"].key)
        assert await ledger.append(tenant, child, version(child), [Ancestor.of(written["1h"])])
        assert client.ttl(f"{prefix}t:{written['1h'].key}") > 1990
        assert client.ttl(f"{prefix}t:{written['5m'].key}") <= 10
        assert sum(client.ttl(name) > 1990 for name in lists) == 2, "its digest's, and its session's"
    assert await ledger.turns(tenant, [written["1h"].key]) == [written["1h"]]
    await ledger.close()


async def test_a_turn_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    server = RedisServer(Role.LEDGER, tmp_path)
    server.start()
    try:
        async with ledger_at(server) as ledger:
            first, second, third = turn(), turn(), turn()
            assert await ledger.append("a", first, version(first))
            server.stop()
            writing = asyncio.create_task(ledger.append("a", second, version(second)))
            await asyncio.sleep(0.2)
            assert not writing.done()
            server.start()
            assert await writing
            assert [found and found.key for found in await ledger.turns("a", [first.key, second.key])] == [
                first.key,
                second.key,
            ]
            server.stop()
            assert not await ledger.append("a", third, version(third))
            started_at = time.monotonic()
            assert not await ledger.append("a", third, version(third))
            assert time.monotonic() - started_at < 0.5, "a server that stays away is not waited for again"
            server.start()
            assert await ledger.append("a", third, version(third))
    finally:
        server.stop()


async def test_a_lost_reply_makes_no_second_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with ledger_at(server) as ledger:
            one = turn(session="s")
            written = Ledger._append
            attempts: list[bool] = []

            async def reply_lost(self: Ledger, *args: Any, again: bool = False) -> None:
                attempts.append(again)
                await written(self, *args, again=again)
                if not again:
                    raise LedgerUnavailable from ConnectionResetError()

            monkeypatch.setattr(Ledger, "_append", reply_lost)
            assert await ledger.append("a", one, version(one))
            assert attempts == [False, True]
            assert len((await ledger.versions("a", [one.digest]))[0]) == 1
            assert [found.key for found in await ledger.session("a", "s")] == [one.key]
