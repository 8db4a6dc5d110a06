"""Values against a real server, and what is left of them when it or its data fail."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import redis
from prometheus_client import REGISTRY
from redis_process import RedisProcess

from bench.fault_proxy import Fault, FaultProxy
from cache_store import format
from cache_store.breaker import State
from cache_store.format import CHUNK_BYTES, HEADER_BYTES, ValueId
from cache_store.options import StoreOptions
from cache_store.values import ValueStore

TTL_MS = 600_000
SPACE = bytes(range(16))
TIMEOUT_S = 0.4


def options(process: RedisProcess, **changes: object) -> StoreOptions:
    settings = {"url": process.unix_url, "timeout_s": TIMEOUT_S, "breaker_cooldown_s": 0.1, **changes}
    return StoreOptions.parse(settings)


@pytest.fixture
def store(redis_process: RedisProcess) -> Iterator[ValueStore]:
    found = ValueStore(options(redis_process, timeout_s=10.0))
    yield found
    found.close()


@pytest.fixture
def hasty(redis_process: RedisProcess) -> Iterator[ValueStore]:
    """A store with a short deadline, for servers that do not answer."""
    found = ValueStore(options(redis_process))
    yield found
    found.close()


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def errors(kind: str) -> float:
    return counted("longhaul_store_errors_total", kind=kind)


class Sample:
    """Values of one length with random payloads."""

    def __init__(self, count: int, length: int, seed: int = 0, name: str = "v") -> None:
        rng = random.Random(seed)
        self.values = [ValueId(b"%b%d" % (name.encode(), i), SPACE, length) for i in range(count)]
        self.payloads = [rng.randbytes(length) for _ in range(count)]
        self.targets = [bytearray(length) for _ in range(count)]

    def put(self, store: ValueStore) -> list[bool]:
        # In uneven parts, as components of a state are.
        cuts = [len(p) // 3 for p in self.payloads]
        payloads = [
            [memoryview(p)[:at], memoryview(p)[at:]] for p, at in zip(self.payloads, cuts, strict=True)
        ]
        return store.put(self.values, payloads, "kv", TTL_MS)

    def find(self, store: ValueStore) -> list[bool]:
        return store.find([value.key for value in self.values], [value.record_bytes for value in self.values])

    def fetch(self, store: ValueStore) -> list[bool]:
        """Which values came, having checked that those that did are right."""
        for target in self.targets:
            target[:] = bytes(len(target))
        targets = [[memoryview(t)[: len(t) // 3], memoryview(t)[len(t) // 3 :]] for t in self.targets]
        done = store.fetch(self.values, targets, "kv", TTL_MS)
        for ok, target, payload in zip(done, self.targets, self.payloads, strict=True):
            assert not ok or target == payload, "wrong bytes taken for right"
        return done


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.02)


SIZES = [1, 1000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 12_345]


@pytest.mark.parametrize("length", SIZES)
def test_round_trip(store: ValueStore, redis_process: RedisProcess, length: int):
    sample = Sample(3, length)
    assert sample.find(store) == [False] * 3
    assert sample.fetch(store) == [False] * 3
    assert sample.put(store) == [True] * 3
    assert sample.find(store) == [True] * 3
    assert sample.fetch(store) == [True] * 3
    server = redis_process.client()
    for key in server.scan_iter():
        assert 0 < server.pttl(key) <= TTL_MS + 60_000
        assert server.strlen(key) <= CHUNK_BYTES + HEADER_BYTES


@pytest.mark.parametrize("length", [1000, 2 * CHUNK_BYTES + 5])
def test_use_prolongs_a_life(store: ValueStore, redis_process: RedisProcess, length: int):
    sample, server = Sample(2, length), redis_process.client()
    sample.put(store)
    for use in (sample.fetch, sample.put):
        for key in server.scan_iter():
            server.pexpire(key, 5_000)
        assert use(store) == [True, True]
        assert all(server.pttl(key) > TTL_MS - 60_000 for key in server.scan_iter())


def test_what_is_there_is_not_written_again(store: ValueStore, redis_process: RedisProcess):
    sample = Sample(3, 2 * CHUNK_BYTES)
    sample.put(store)
    before = redis_process.client().info("stats")["total_net_input_bytes"]
    assert sample.put(store) == [True] * 3
    assert redis_process.client().info("stats")["total_net_input_bytes"] - before < 10_000


def test_two_payloads_under_one_key_never_mix(store: ValueStore, redis_process: RedisProcess):
    """Engines may differ in the last bit: a manifest names the chunks of its own writer alone."""
    one, two = Sample(1, 3 * CHUNK_BYTES, seed=1), Sample(1, 3 * CHUNK_BYTES, seed=2)
    one.put(store)
    manifest = redis_process.client().get(b"v0")
    redis_process.client().delete(b"v0")
    two.put(store)
    assert two.fetch(store) == [True]
    redis_process.client().set(b"v0", manifest)
    assert one.fetch(store) == [True]


def damages(server: redis.Redis, rng: random.Random) -> dict[str, Callable[[bytes, list[bytes]], None]]:
    def flip(key: bytes, _: list[bytes]) -> None:
        blob = bytearray(server.get(key))
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
        server.set(key, bytes(blob))

    def flip_header(key: bytes, _: list[bytes]) -> None:
        blob = bytearray(server.get(key))
        blob[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        server.set(key, bytes(blob))

    def cut(key: bytes, _: list[bytes]) -> None:
        server.set(key, server.get(key)[: rng.randrange(server.strlen(key))])

    def grow(key: bytes, _: list[bytes]) -> None:
        server.append(key, b"x")

    def zero(key: bytes, _: list[bytes]) -> None:
        server.set(key, bytes(server.strlen(key)))

    def zero_payload(key: bytes, _: list[bytes]) -> None:
        server.set(key, server.get(key)[:HEADER_BYTES] + bytes(server.strlen(key) - HEADER_BYTES))

    def swap(key: bytes, others: list[bytes]) -> None:
        alike = [other for other in others if server.strlen(other) == server.strlen(key)]
        other = rng.choice([other for other in alike if other != key])
        mine, theirs = server.get(key), server.get(other)
        server.set(key, theirs)
        server.set(other, mine)

    def remove(key: bytes, _: list[bytes]) -> None:
        server.delete(key)

    def retype(key: bytes, _: list[bytes]) -> None:
        server.delete(key)
        server.rpush(key, "x")

    return {f.__name__: f for f in (flip, flip_header, cut, grow, zero, zero_payload, swap, remove, retype)}


DAMAGES = list(damages(redis.Redis(), random.Random()))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("length", [1000, 3 * CHUNK_BYTES])
def test_damage_is_a_miss_and_is_cleared_away(
    store: ValueStore, redis_process: RedisProcess, length: int, damage: str
):
    server, rng = redis_process.client(), random.Random(f"{damage}{length}")
    count = 4 if length < CHUNK_BYTES else 2
    for seed in range(count // 2):
        sample = Sample(count, length, seed=seed)
        sample.put(store)
        keys = sorted(server.keys())
        damages(server, rng)[damage](rng.choice(keys), keys)
        done = sample.fetch(store)
        assert not all(done)
        # Missed once, a damaged value is not promised again, and can be written again.
        assert sample.find(store) == done
        assert sample.put(store) == [True] * count
        assert sample.fetch(store) == [True] * count
        server.flushall()


def test_swapped_chunks_of_one_value_are_a_miss(store: ValueStore, redis_process: RedisProcess):
    server, sample = redis_process.client(), Sample(1, 3 * CHUNK_BYTES)
    sample.put(store)
    one, two = sorted(server.keys(b"v0:*"))[:2]
    first, second = server.get(one), server.get(two)
    server.set(one, second)
    server.set(two, first)
    assert sample.fetch(store) == [False]


def test_another_namespace_reads_nothing(store: ValueStore):
    for length in (1000, 2 * CHUNK_BYTES):
        sample = Sample(2, length)
        sample.put(store)
        sample.values = [ValueId(value.key, bytes(16), length) for value in sample.values]
        assert sample.fetch(store) == [False, False]


def test_a_killed_server_is_a_miss_and_failed_writes_come_later(
    hasty: ValueStore, redis_process: RedisProcess
):
    sample, late = Sample(3, 1000), Sample(3, 2 * CHUNK_BYTES, name="late")
    sample.put(hasty)
    redis_process.kill()
    lost = errors("connect")
    assert sample.fetch(hasty) == [False] * 3
    assert sample.find(hasty) == [False] * 3
    assert errors("connect") >= lost + 2
    assert late.put(hasty) == [True] * 3
    assert hasty.waiting == 3
    redis_process.start()
    eventually(lambda: hasty.waiting == 0)
    eventually(lambda: hasty.breaker_state is State.CLOSED)
    assert late.fetch(hasty) == [True] * 3
    assert sample.fetch(hasty) == [False] * 3


def test_a_stalled_server_costs_the_deadline_then_nothing(hasty: ValueStore, redis_process: RedisProcess):
    sample = Sample(20, 100_000)
    sample.put(hasty)
    redis_process.signal(signal.SIGSTOP)
    spent: list[float] = []
    for _ in range(10):
        started = time.monotonic()
        assert sample.fetch(hasty) == [False] * 20
        spent.append(time.monotonic() - started)
    assert max(spent) < TIMEOUT_S + 0.5
    assert hasty.breaker_state is not State.CLOSED
    # Once it is open, no call waits, not even while a probe is under way.
    assert max(spent[1:]) < TIMEOUT_S / 2
    assert errors("breaker_open") > 0
    redis_process.signal(signal.SIGCONT)
    eventually(lambda: hasty.breaker_state is State.CLOSED)
    assert sample.fetch(hasty) == [True] * 20


def test_replies_that_come_too_late_are_nobodys(hasty: ValueStore, redis_process: RedisProcess):
    """A times out; B is asked, then A again: each gets its own bytes or none."""
    a, b = Sample(5, 50_000, seed=1, name="a"), Sample(5, 50_000, seed=2, name="b")
    a.put(hasty)
    b.put(hasty)
    for _ in range(4):
        redis_process.signal(signal.SIGSTOP)
        assert a.fetch(hasty) == [False] * 5
        redis_process.signal(signal.SIGCONT)
        eventually(lambda: hasty.breaker_state is State.CLOSED)
        assert b.fetch(hasty) == [True] * 5
        assert a.fetch(hasty) == [True] * 5


def test_killed_connections_in_the_middle_of_everything(store: ValueStore, redis_process: RedisProcess):
    sample, stop = Sample(8, 400_000), threading.Event()
    sample.put(store)

    def cut() -> None:
        server = redis_process.client()
        while not stop.is_set():
            server.client_kill_filter(_type="normal", skipme=True)
            time.sleep(0.003)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        outcomes = [ok for _ in range(150) for ok in sample.fetch(store)]
    finally:
        stop.set()
        thread.join()
    assert False in outcomes, "no connection was cut: nothing was tested"
    eventually(lambda: store.breaker_state is State.CLOSED)
    assert sample.fetch(store) == [True] * 8


def test_a_full_server_refuses_writes_and_serves_reads(redis_process: RedisProcess):
    redis_process.kill()
    redis_process.start("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    store = ValueStore(options(redis_process, timeout_s=5.0, retry_bytes=40 * CHUNK_BYTES))
    small, large = Sample(5, 1000), Sample(4, 2 * CHUNK_BYTES, name="large")
    refused = errors("oom")
    assert small.put(store) == [True] * 5
    large.put(store)
    assert errors("oom") > refused
    assert store.breaker_state is State.CLOSED
    assert small.fetch(store) == [True] * 5
    large.fetch(store)
    redis_process.client().config_set("maxmemory", "200mb")
    eventually(lambda: store.waiting == 0, 30)
    assert large.fetch(store) == [True] * 4
    store.close()


def test_what_evicts_keeps_to_misses(redis_process: RedisProcess):
    redis_process.kill()
    redis_process.start("--maxmemory", "30mb", "--maxmemory-policy", "allkeys-lru")
    store = ValueStore(options(redis_process, timeout_s=5.0))
    samples = [Sample(2, 2 * CHUNK_BYTES, seed=seed, name=f"s{seed}-") for seed in range(4)]
    for sample in samples:
        assert sample.put(store) == [True] * 2
    outcomes = [ok for sample in samples for ok in sample.fetch(store)]
    assert False in outcomes
    # What could not be read is not promised any more. More may go at any time: replies take memory too.
    promised = [ok for sample in samples for ok in sample.find(store)]
    assert not any(there and not ok for there, ok in zip(promised, outcomes, strict=True))
    store.close()


def test_a_half_written_value_is_not_seen(store: ValueStore, redis_process: RedisProcess):
    sample = Sample(1, 3 * CHUNK_BYTES)
    value = sample.values[0]
    parts = format.cut([memoryview(sample.payloads[0])])
    digests = [format.digest(part) for part in parts]
    server = redis_process.client()
    for index, key in enumerate(format.chunk_keys(value, digests)):
        assert sample.find(store) == [False]
        assert sample.fetch(store) == [False]
        body = b"".join(parts[index])
        server.set(key, format.chunk_header(value, index, digests[index]) + body)
    assert sample.find(store) == [False]
    server.set(value.key, format.manifest(value, digests))
    assert sample.fetch(store) == [True]


def test_the_queue_is_bounded(redis_process: RedisProcess):
    store = ValueStore(options(redis_process, retry_bytes=2500, drain_s=0))
    redis_process.kill()
    sample = Sample(4, 1000)
    assert sample.put(store) == [True, True, False, False]
    store.close()


def test_closing_writes_what_waits(redis_process: RedisProcess):
    store = ValueStore(options(redis_process, breaker_failures=100, timeout_s=0.2))
    redis_process.signal(signal.SIGSTOP)
    sample = Sample(3, 1000)
    assert sample.put(store) == [True] * 3
    redis_process.signal(signal.SIGCONT)
    store.close()
    assert len(redis_process.client().keys()) == 3


def test_closing_on_a_dead_server_ends(redis_process: RedisProcess):
    store = ValueStore(options(redis_process, drain_s=1.0))
    redis_process.signal(signal.SIGSTOP)
    Sample(3, 1000).put(store)
    lost = errors("unwritten")
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 2.5
    assert errors("unwritten") == lost + 3
    store.close()


def test_clearing_takes_the_prefix_alone(store: ValueStore, redis_process: RedisProcess):
    Sample(2500, 10, name="mine").put(store)
    Sample(3, 10, name="other").put(store)
    assert store.clear(b"mine")
    assert len(redis_process.client().keys()) == 3


def test_a_host_without_an_address_is_a_miss(redis_process: RedisProcess):
    store = ValueStore(options(redis_process, url="redis://nowhere.invalid:6379", drain_s=0))
    assert Sample(2, 100).fetch(store) == [False, False]
    store.close()


def test_a_loading_server_is_a_miss(redis_process: RedisProcess):
    redis_process.client().config_set("requirepass", "secret")
    store = ValueStore(options(redis_process, drain_s=0))
    refused = errors("noauth")
    assert Sample(2, 100).find(store) == [False, False]
    assert errors("noauth") == refused + 1
    store.close()


def test_what_moves_is_counted(store: ValueStore):
    def pages(direction: str, outcome: str) -> float:
        return counted("longhaul_store_pages_total", pool="kv", direction=direction, outcome=outcome)

    before = pages("read", "ok"), pages("read", "missed"), pages("written", "ok")
    moved = counted("longhaul_store_bytes_total", pool="kv", direction="read")
    sample = Sample(3, 500)
    sample.fetch(store)
    sample.put(store)
    sample.fetch(store)
    assert (pages("read", "ok"), pages("read", "missed"), pages("written", "ok")) == (
        before[0] + 3,
        before[1] + 3,
        before[2] + 3,
    )
    assert counted("longhaul_store_bytes_total", pool="kv", direction="read") == moved + 1500
    assert counted("longhaul_store_seconds_count", call="read") >= 2


def test_random_order_under_random_faults_is_never_wrong(redis_process: RedisProcess):
    """Many threads, a server that stalls, loses connections and keys: what comes is right."""
    store = ValueStore(options(redis_process, timeout_s=0.3))
    stop, wrong = threading.Event(), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        samples = [
            Sample(3, rng.choice([500, 70_000, CHUNK_BYTES + 9]), seed, f"{seed}.{i}.") for i in range(4)
        ]
        try:
            while not stop.is_set():
                sample = rng.choice(samples)
                (sample.put if rng.random() < 0.4 else sample.fetch)(store)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    rng, server, until = random.Random(9), redis_process.client(), time.monotonic() + 4
    while time.monotonic() < until:
        match rng.randrange(8):
            case 0:
                server.flushall()
            case 1 | 2:
                server.client_kill_filter(_type="normal", skipme=True)
            case 3 | 4:
                redis_process.signal(signal.SIGSTOP)
                time.sleep(rng.random() * 0.5)
                redis_process.signal(signal.SIGCONT)
            case _:
                if key := server.randomkey():
                    server.setrange(key, rng.randrange(HEADER_BYTES), os.urandom(3))
        time.sleep(rng.random() * 0.1)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    store.close()


@pytest.mark.parametrize("length", [1000, 2 * CHUNK_BYTES + 5])
def test_use_never_shortens_a_life(store: ValueStore, redis_process: RedisProcess, length: int):
    sample, server = Sample(2, length), redis_process.client()
    sample.put(store)
    for key in server.scan_iter():
        server.pexpire(key, 100 * TTL_MS)
    assert sample.fetch(store) == sample.put(store) == [True, True]
    assert all(server.pttl(key) > 50 * TTL_MS for key in server.scan_iter())


@pytest.mark.parametrize("length", [1000, 2 * CHUNK_BYTES + 5])
def test_a_life_is_shortened_with_all_its_chunks(store: ValueStore, redis_process: RedisProcess, length: int):
    sample, server = Sample(3, length), redis_process.client()
    sample.put(store)
    assert store.shorten(sample.values[:2], [5_000, 2 * TTL_MS]) == 1
    left = {key: server.pttl(key) for key in server.scan_iter()}
    assert all((ttl <= 65_000) == key.startswith(b"v0") for key, ttl in left.items())
    assert all(ttl > 5_000 for key, ttl in left.items() if key != b"v0")
    # What is not there stays away.
    assert store.shorten(Sample(1, length, name="none").values, 1) == 0
    store.prolong(sample.values, TTL_MS)
    assert all(server.pttl(key) > TTL_MS - 60_000 for key in server.scan_iter())


def test_each_value_has_its_own_life(store: ValueStore, redis_process: RedisProcess):
    sample, server = Sample(3, 1000), redis_process.client()
    store.put(sample.values, [[memoryview(p)] for p in sample.payloads], "kv", [100_000, 200_000, 300_000])
    assert [round(server.pttl(b"v%d" % i) / 1e5) for i in range(3)] == [1, 2, 3]


def test_bookkeeping_is_one_round_trip_or_nothing(hasty: ValueStore, redis_process: RedisProcess):
    assert hasty.integers([(b"SADD", b"s", b"7"), (b"SCARD", b"s"), (b"PTTL", b"s"), (b"PTTL", b"n")]) == [
        1,
        1,
        -1,
        -2,
    ]
    assert hasty.integers([]) == []
    redis_process.kill()
    assert hasty.integers([(b"SCARD", b"s")]) is None


def test_a_read_that_was_given_up_leaves_nothing_behind(redis_process: RedisProcess):
    """By the time a slow server goes on sending, the engine has given the memory to others."""
    sample = Sample(8, 300_000)
    with (
        FaultProxy(("127.0.0.1", redis_process.port)) as proxy,
        closing(ValueStore(options(redis_process, url=proxy.url, timeout_s=0.5))) as slow,
    ):
        sample.put(slow)
        threads = threading.active_count()
        proxy.set(Fault(bytes_per_s=1_500_000))
        targets = [bytearray(300_000) for _ in sample.values]
        done = slow.fetch(sample.values, [[memoryview(t)] for t in targets], "kv", TTL_MS)
        assert any(map(any, targets)) and not all(done), "nothing was under way when it was given up"
        before = [bytes(target) for target in targets]
        proxy.set(None)
        time.sleep(0.5)
        assert [bytes(target) for target in targets] == before
        assert sample.fetch(slow) == [True] * 8
        eventually(lambda: threading.active_count() <= threads)
        eventually(lambda: redis_process.client().info("clients")["connected_clients"] <= 3)
