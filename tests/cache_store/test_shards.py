"""One store over several servers: who has what, and what is left when one of them is down."""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from redis_process import RedisProcess

from cache_store.breaker import State
from cache_store.format import CHUNK_BYTES, ValueId
from cache_store.options import StoreOptions
from cache_store.shards import Shards

TTL_MS = 600_000
SPACE = bytes(16)
TIMEOUT_S = 0.4


@pytest.fixture
def servers() -> Iterator[list[RedisProcess]]:
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        found = [RedisProcess(Path(folder, str(n))) for n in range(3)]
        try:
            for n, process in enumerate(found):
                Path(folder, str(n)).mkdir()
                process.start()
            yield found
        finally:
            for process in found:
                process.kill()


def opened(urls: list[str], **changes: object) -> Shards:
    return Shards(
        StoreOptions.parse({"url": urls, "timeout_s": TIMEOUT_S, "breaker_cooldown_s": 0.1, **changes})
    )


@pytest.fixture
def store(servers: list[RedisProcess]) -> Iterator[Shards]:
    found = opened([process.unix_url for process in servers])
    yield found
    found.close()


def sample(count: int, length: int = 3000) -> tuple[list[ValueId], list[list[memoryview]]]:
    ids = [ValueId(b"page:%d:%d" % (length, n), SPACE, length) for n in range(count)]
    return ids, [[memoryview(bytes([n % 251]) * length)] for n in range(count)]


def fetched(store: Shards, ids: list[ValueId], payloads: list[list[memoryview]]) -> list[bool]:
    targets = [[memoryview(bytearray(value.length))] for value in ids]
    done = store.fetch(ids, targets, "kv", TTL_MS)
    for ok, target, payload in zip(done, targets, payloads, strict=True):
        assert not ok or target[0] == payload[0]
    return done


def found(store: Shards, ids: list[ValueId]) -> list[bool]:
    return store.find([value.key for value in ids], [value.record_bytes for value in ids])


def test_values_spread_over_all_servers_and_come_back(store: Shards, servers: list[RedisProcess]):
    ids, payloads = sample(300)
    assert store.put(ids, payloads, "kv", TTL_MS) == [True] * 300
    assert found(store, ids) == fetched(store, ids, payloads) == [True] * 300
    held = [process.client().dbsize() for process in servers]
    assert sum(held) == 300
    assert min(held) > 60
    large, contents = sample(5, 2 * CHUNK_BYTES)
    assert store.put(large, contents, "mamba", TTL_MS) == [True] * 5
    assert fetched(store, large, contents) == [True] * 5


def test_one_that_is_down_is_a_miss_for_its_own_keys(store: Shards, servers: list[RedisProcess]):
    ids, payloads = sample(200)
    store.put(ids, payloads, "kv", TTL_MS)
    down = [store.shard_of(value.key) == 1 for value in ids]
    servers[1].kill()
    for _ in range(4):
        assert fetched(store, ids, payloads) == found(store, ids) == [not lost for lost in down]
    assert store.breaker_states == [State.CLOSED, State.OPEN, State.CLOSED]
    assert REGISTRY.get_sample_value("longhaul_store_breaker", {"server": f"unix:{servers[1].path}"}) != 0
    # What it missed meanwhile is written when it is back.
    more, contents = sample(60, 500)
    assert store.put(more, contents, "kv", TTL_MS) == [True] * 60
    assert store.waiting == sum(store.shard_of(value.key) == 1 for value in more)
    servers[1].start()
    until = time.monotonic() + 15
    while store.waiting or store.breaker_states[1] is not State.CLOSED:
        assert time.monotonic() < until, "the server is back, and nothing was written"
        time.sleep(0.05)
    assert fetched(store, more, contents) == [True] * 60


def test_all_that_stall_cost_one_deadline_together(store: Shards, servers: list[RedisProcess]):
    ids, payloads = sample(30)
    store.put(ids, payloads, "kv", TTL_MS)
    for process in servers:
        process.signal(signal.SIGSTOP)
    started = time.monotonic()
    assert fetched(store, ids, payloads) == [False] * 30
    assert time.monotonic() - started < TIMEOUT_S + 0.5
    for process in servers:
        process.signal(signal.SIGCONT)


def test_lives_and_bookkeeping_reach_the_right_server(store: Shards, servers: list[RedisProcess]):
    ids, payloads = sample(40)
    store.put(ids, payloads, "kv", TTL_MS)
    assert store.shorten(ids, 1000) == 40
    assert store.prolong(ids[:20], [TTL_MS] * 20)
    replies = store.integers([(b"PTTL", value.key) for value in ids])
    assert replies is not None
    assert min(replies[:20]) > 1000 >= max(replies[20:])
    client = servers[store.shard_of(b"plain")].client()
    client.set("plain", "text")
    assert store.record(b"plain", 4) == b"text"
    servers[0].kill()
    assert store.integers([(b"PTTL", value.key) for value in ids]) is None


def test_clearing_reaches_all(store: Shards, servers: list[RedisProcess]):
    ids, payloads = sample(60)
    store.put(ids, payloads, "kv", TTL_MS)
    assert store.clear(b"page:")
    assert [process.client().dbsize() for process in servers] == [0, 0, 0]
    servers[2].kill()
    assert not store.clear(b"page:")


def test_closing_waits_for_all_at_once(servers: list[RedisProcess]):
    store = opened([process.unix_url for process in servers], drain_s=1.0)
    for process in servers:
        process.signal(signal.SIGSTOP)
    ids, payloads = sample(30)
    assert store.put(ids, payloads, "kv", TTL_MS) == [True] * 30
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 2.5
    for process in servers:
        process.signal(signal.SIGCONT)


NAMES = st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True)


def shares(names: list[int]) -> dict[bytes, str]:
    """Which server has which key, without one that is there."""
    store = opened([f"unix:///nowhere/{name}" for name in names], drain_s=0)
    try:
        keys = [b"key%d" % n for n in range(200)]
        return {key: f"unix:///nowhere/{names[store.shard_of(key)]}" for key in keys}
    finally:
        store.close()


@given(NAMES, st.randoms(use_true_random=False))
def test_where_a_value_lies_does_not_depend_on_the_order(names: list[int], source: random.Random):
    mixed = names.copy()
    source.shuffle(mixed)
    assert shares(names) == shares(mixed)


@given(NAMES)
def test_a_server_more_moves_keys_to_itself_alone(names: list[int]):
    before, after = shares(names[:-1]), shares(names)
    moved = {key for key in before if before[key] != after[key]}
    assert {after[key] for key in moved} <= {f"unix:///nowhere/{names[-1]}"}


def test_the_setting_takes_a_list_and_commas():
    assert StoreOptions.parse({"url": "redis://a, redis://b/2"}).urls == ["redis://a", "redis://b/2"]
    assert StoreOptions.parse({"url": ["redis://a", "unix:///s"]}).urls == ["redis://a", "unix:///s"]
    with pytest.raises(ValueError, match="named twice"):
        StoreOptions.parse({"url": "redis://user:x@a:6379,redis://a"})
    with pytest.raises(ValueError, match="use redis://"):
        StoreOptions.parse({"url": "redis://a,"})


def test_an_interpreter_that_ends_closes_it(servers: list[RedisProcess]) -> None:
    lines = (
        "import atexit, sys",
        "from cache_store.options import StoreOptions",
        "from cache_store.shards import Shards",
        "store = Shards(StoreOptions.parse({'url': sys.argv[1:]}))",
        "atexit.register(store.close)",
        "atexit.register(lambda: print('ends'))",
    )
    urls = [process.unix_url for process in servers]
    command = [sys.executable, "-c", "\n".join(lines), *urls]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"ends\n", b"")
