"""Ranks that read the same pages: each is asked for once, and right whatever the shared memory holds."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_process import RedisProcess

from cache_store import siblings
from cache_store.format import ValueId
from cache_store.options import StoreOptions
from cache_store.shards import Shards
from cache_store.siblings import Siblings

PAGE_BYTES = 10_000
SPACE = bytes(16)
LIFE_MS = 600_000
SHARE_BYTES = 4 << 20
VALUES = [ValueId(b"page%d" % n, SPACE, PAGE_BYTES) for n in range(100)]
PAYLOADS = [random.Random(n).randbytes(PAGE_BYTES) for n in range(100)]


@pytest.fixture
def store(redis_process: RedisProcess) -> Iterator[Shards]:
    found = Shards(StoreOptions.parse({"url": redis_process.unix_url, "timeout_s": 5.0}))
    assert all(found.put(VALUES, [[memoryview(payload)] for payload in PAYLOADS], "kv", LIFE_MS))
    yield found
    found.close()


@pytest.fixture
def ranks(store: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Siblings]]:
    monkeypatch.setattr(siblings, "MEMORY", tmp_path)
    found = [Siblings(store, "test", rank, PAGE_BYTES, SHARE_BYTES, 5.0) for rank in range(4)]
    yield found
    for rank in found:
        rank.close()
    assert not list(tmp_path.iterdir())


def fetched(rank: Siblings, values: list[ValueId] = VALUES) -> list[bool]:
    targets = [[memoryview(bytearray(3000)), memoryview(bytearray(PAGE_BYTES - 3000))] for _ in values]
    done = rank.fetch(values, targets, "kv", LIFE_MS)
    for ok, value, target in zip(done, values, targets, strict=True):
        assert not ok or b"".join(target) == PAYLOADS[VALUES.index(value)]
    return done


def together(ranks: list[Siblings]) -> list[list[bool]]:
    results: dict[int, list[bool]] = {}

    def work(index: int) -> None:
        results[index] = fetched(ranks[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[index] for index in range(len(ranks))]


def gets(redis_process: RedisProcess) -> int:
    return int(redis_process.client().info("commandstats")["cmdstat_get"]["calls"])


def test_each_page_is_asked_for_once(
    ranks: list[Siblings], redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
):
    # On a busy machine a thread may wait longer for its turn than ranks wait for each other.
    monkeypatch.setattr(siblings, "_MIN_PATIENCE_S", 4.0)
    assert together(ranks) == [[True] * 100] * 4
    assert gets(redis_process) == 100


def test_ranks_that_do_not_come_are_not_waited_for(ranks: list[Siblings], redis_process: RedisProcess):
    started = time.monotonic()
    assert fetched(ranks[2]) == [True] * 100
    assert time.monotonic() - started < 2
    assert gets(redis_process) == 100


def test_what_is_spoilt_is_read_from_the_server(
    ranks: list[Siblings], redis_process: RedisProcess, tmp_path: Path
):
    assert fetched(ranks[0]) == [True] * 100
    with next(tmp_path.iterdir()).open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        source = random.Random(3)
        for _ in range(2000):
            file.seek(source.randrange(4096, size))
            file.write(source.randbytes(1))
    for rank in ranks:
        assert fetched(rank) == [True] * 100


def test_slots_of_other_pages_are_no_pages(ranks: list[Siblings]):
    """Calls that share a region, in any order."""
    for values in (VALUES[:50], VALUES[50:], VALUES[25:75][::-1], VALUES[:50]):
        for rank in ranks:
            assert fetched(rank, values) == [True] * 50


def test_what_is_gone_is_a_miss(ranks: list[Siblings], redis_process: RedisProcess):
    redis_process.client().delete("page3", "page77")
    expected = [n not in (3, 77) for n in range(100)]
    assert together(ranks) == [expected] * 4


def test_a_dead_server_costs_no_second_deadline(
    store: Shards, ranks: list[Siblings], redis_process: RedisProcess
):
    redis_process.kill()
    assert fetched(ranks[1]) == [False] * 100


def test_memory_of_a_killed_engine_is_given_back(
    store: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(siblings, "MEMORY", tmp_path)
    (tmp_path / "longhaul-pages-999999999-old").write_bytes(b"x")
    rank = Siblings(store, "new", 0, PAGE_BYTES, SHARE_BYTES, 5.0)
    assert [path.name.split("-")[3] for path in tmp_path.iterdir()] == ["new"]
    assert fetched(rank) == [True] * 100  # alone
    rank.close()
