"""Lives, superseded states and accounts, on a real server."""

import hashlib
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import redis
from prometheus_client import REGISTRY
from redis_process import RedisProcess

from cache_store.chain import Span, StoredPool
from cache_store.format import CHUNK_BYTES
from cache_store.keeper import Keeper
from cache_store.options import StoreOptions
from cache_store.retention import TTL_MS, TtlClass
from cache_store.roots import Root, root_key
from cache_store.shards import Shards

SPACE = bytes(range(16))
PAGE_TOKENS = 64
KV = StoredPool("kv", SPACE, "", 100)
STATES = StoredPool("mamba", SPACE, "t0.2", 2 * CHUNK_BYTES)
SUPERSEDED_S = 20.0


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def chain(length: int, *branch: tuple[int, str]) -> list[str]:
    """Hashes of the pages of a chain, each over all before it; `branch` says where it leaves others."""
    pages: list[str] = []
    seeds = dict(branch)
    state, seed = "", ""
    for position in range(1, length + 1):
        seed = seeds.get(position, seed)
        state = hashlib.sha256(f"{state}{seed}{position}".encode()).hexdigest()
        pages.append(state)
    return pages


class Engine:
    """What one engine process does with the store, without the engine."""

    def __init__(self, process: RedisProcess, **options: object) -> None:
        settings = {"url": process.unix_url, "timeout_s": 5.0, "superseded_ttl_s": SUPERSEDED_S, "drain_s": 0}
        self.options = StoreOptions.parse(settings | options)
        self.now = 1_700_000_000.0
        self.values = Shards(self.options)
        self.keeper = Keeper(self.values, self.options, clock=lambda: self.now, timer=lambda: self.now)
        self.keeper.register(KV, page_tokens=PAGE_TOKENS)
        self.keeper.register(STATES)

    def store_state(self, pages: Sequence[str]) -> None:
        span = Span([pages[-1]], list(pages[:-1]))
        payload = [memoryview(bytes(STATES.length))]
        assert self.values.put(STATES.values(span.keys), [payload], "mamba", self.keeper.lives_ms(span)) == [
            True
        ]
        self.keeper.arrived(STATES, span)

    def store_pages(self, pages: Sequence[str], start: int) -> None:
        span = Span(pages[start:], list(pages[:start]))
        done = self.values.put(
            KV.values(span.keys),
            [[memoryview(bytes(100))]] * len(span.keys),
            "kv",
            self.keeper.lives_ms(span),
        )
        self.keeper.written(KV, span, done)

    def turn(self, pages: Sequence[str], start: int) -> None:
        """One node of SGLang's tree: its state first, then its pages."""
        self.store_state(pages)
        self.store_pages(pages, start)
        self.settle()

    def settle(self) -> None:
        self.now += 1.5
        while self.keeper.work():
            pass

    def close(self) -> None:
        self.keeper.close()
        self.values.close()


@pytest.fixture
def engines(redis_process: RedisProcess) -> Iterator[list[Engine]]:
    found: list[Engine] = []
    yield found
    for engine in found:
        engine.close()


@pytest.fixture
def engine(redis_process: RedisProcess, engines: list[Engine]) -> Engine:
    engines.append(Engine(redis_process))
    return engines[0]


def staying(server: redis.Redis, pages: Sequence[str], limit_s: float = SUPERSEDED_S) -> list[int]:
    """Positions of the states of a chain that live longer than superseded ones."""
    keys = STATES.keys(pages)
    return [at for at, key in enumerate(keys, 1) if server.pttl(key) > limit_s * 1000]


def test_what_a_newer_state_supersedes_expires_soon_with_its_chunks(
    engine: Engine, redis_process: RedisProcess
):
    server, pages = redis_process.client(), chain(50)
    for start, end in [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]:
        engine.turn(pages[:end], start)
    assert staying(server, pages) == [40, 50]
    for position in (10, 20, 30):
        for key in server.keys(STATES.keys(pages)[position - 1] + b"*"):
            assert 0 < server.pttl(key) <= SUPERSEDED_S * 1000 + 60_000
    assert len(server.keys(STATES.keys(pages)[9] + b":*")) == 2, "chunks"
    assert all(server.pttl(key) > TTL_MS["24h"] - 60_000 for key in KV.keys(pages))


def test_a_superseded_state_is_not_prolonged_by_later_turns(engine: Engine, redis_process: RedisProcess):
    server, pages = redis_process.client(), chain(60)
    engine.turn(pages[:10], 0)
    engine.turn(pages[:20], 10)
    engine.turn(pages[:30], 20)
    key = STATES.keys(pages)[9]
    server.pexpire(key, 3_000)
    engine.turn(pages[:40], 30)
    assert 0 < server.pttl(key) <= 3_000


def test_one_state_every_so_many_tokens_stays(redis_process: RedisProcess, engines: list[Engine]):
    engines.append(Engine(redis_process, state_keep_every=20 * PAGE_TOKENS))
    pages = chain(100)
    for end in range(7, 101, 7):
        engines[0].turn(pages[:end], end - 7)
    assert staying(redis_process.client(), pages) == [21, 42, 63, 84, 91, 98]


def test_the_state_before_a_fork_stays(engine: Engine, redis_process: RedisProcess):
    server, one = redis_process.client(), chain(80)
    two = chain(80, (26, "other"))
    for end in (10, 20, 30, 40):
        engine.turn(one[:end], end - 10)
    engine.turn(two[:36], 25)  # continues from 20, which the first chain had superseded
    assert engine.values.fetch(
        STATES.values([one[19]]), [[memoryview(bytearray(STATES.length))]], "mamba", 10**8
    )
    for end in (50, 60, 70):
        engine.turn(one[:end], end - 10)
    for end in (46, 56, 66):
        engine.turn(two[:end], end - 10)
    assert staying(server, one) == [20, 60, 70]
    assert staying(server, two) == [20, 56, 66]


def test_a_state_that_comes_late_between_others_is_known_for_a_fork(
    engine: Engine, redis_process: RedisProcess
):
    """SGLang stores a state where a second branch leaves the first, after the states around it."""
    server, one, two = redis_process.client(), chain(80), chain(80, (26, "other"))
    engine.turn(one[:10], 0)
    engine.turn(one[:40], 10)
    engine.turn(one[:50], 40)
    engine.store_state(one[:25])
    engine.turn(two[:35], 25)
    for end in (45, 55):
        engine.turn(two[:end], end - 10)
    assert 25 in staying(server, two)
    for end in (60, 70):
        engine.turn(one[:end], end - 10)
    assert staying(server, one) == [25, 60, 70]


def test_another_engine_goes_on_where_one_stopped(redis_process: RedisProcess, engines: list[Engine]):
    """What a process remembers is not needed."""
    pages, server = chain(80), redis_process.client()
    for end in range(10, 81, 10):
        engines.append(Engine(redis_process, state_keep_every=30 * PAGE_TOKENS))
        engines[-1].turn(pages[:end], end - 10)
    assert staying(server, pages) == [30, 60, 70, 80]


def test_nothing_is_superseded_by_a_chain_that_is_not_whole(engine: Engine, redis_process: RedisProcess):
    server, pages = redis_process.client(), chain(60)
    for end in (10, 20):
        engine.turn(pages[:end], end - 10)
    # The state is there, its pages are not yet.
    engine.store_state(pages[:30])
    engine.settle()
    assert staying(server, pages) == [10, 20, 30]
    engine.store_pages(pages[:30], 20)
    engine.now += 4
    engine.settle()
    assert staying(server, pages) == [20, 30]
    # A page in the middle was evicted: what is before it is all that is left.
    server.unlink(KV.keys(pages)[24])
    engine.turn(pages[:40], 30)
    for _ in range(3):
        engine.now += 30
        engine.settle()
    assert staying(server, pages) == [20, 30, 40]
    assert engine.keeper.waiting == 0


def test_a_dead_server_supersedes_nothing_and_ends_no_thread(engine: Engine, redis_process: RedisProcess):
    pages = chain(40)
    for end in (10, 20):
        engine.turn(pages[:end], end - 10)
    redis_process.kill()
    engine.keeper.arrived(STATES, Span([pages[29]], pages[:29]))
    engine.keeper.written(KV, Span(pages[20:30], pages[:20]), [True] * 10)
    assert engine.keeper.admits(KV, Span(pages[20:30], pages[:20]))
    for _ in range(3):
        engine.now += 30
        engine.settle()
    assert engine.keeper.waiting == 0
    assert any(thread.name == "longhaul-retention" for thread in threading.enumerate())


def test_states_are_judged_without_being_asked(redis_process: RedisProcess, engines: list[Engine]):
    engine = Engine(redis_process)
    engine.keeper.close()
    engine.keeper = Keeper(engine.values, engine.options)
    engines.append(engine)
    engine.keeper.register(KV, page_tokens=PAGE_TOKENS)
    engine.keeper.register(STATES)
    pages = chain(30)
    for end in (10, 20, 30):
        engine.store_state(pages[:end])
        engine.store_pages(pages[:end], end - 10)
    until = time.monotonic() + 20
    while staying(redis_process.client(), pages) != [20, 30]:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_superseded_and_expired_states_are_counted(engine: Engine, redis_process: RedisProcess):
    def states(outcome: str) -> float:
        return counted("longhaul_store_states_total", outcome=outcome)

    server, pages = redis_process.client(), chain(60)
    before = states("superseded"), states("expired")
    for end in (10, 20, 30, 40):
        engine.turn(pages[:end], end - 10)
    assert (states("superseded"), states("expired")) == (before[0] + 2, before[1])
    server.unlink(STATES.keys(pages)[9])
    engine.turn(pages[:50], 40)
    engine.turn(pages[:60], 50)
    assert (states("superseded"), states("expired")) == (before[0] + 4, before[1] + 1)


def test_a_read_prolongs_what_is_before_it(redis_process: RedisProcess, engines: list[Engine]):
    server, pages = redis_process.client(), chain(100)
    engines += [Engine(redis_process), Engine(redis_process)]
    engines[0].store_pages(pages, 0)
    for key in KV.keys(pages):
        server.pexpire(key, 5_000)
    span = Span(pages[60:], pages[:60])
    targets = [[memoryview(bytearray(100))] for _ in span.keys]
    reader = engines[1]
    done = reader.values.fetch(KV.values(span.keys), targets, "kv", reader.keeper.lives_ms(span))
    reader.keeper.read(KV, span, done)
    reader.settle()
    assert all(server.pttl(key) > TTL_MS["24h"] - 60_000 for key in KV.keys(pages))
    # A read that failed in part prolongs nothing.
    for key in KV.keys(pages[:50]):
        server.pexpire(key, 5_000)
    engines.append(Engine(redis_process))
    engines[2].keeper.read(KV, span, [True] * 39 + [False])
    assert engines[2].keeper.waiting == 0


@pytest.mark.parametrize("ttl", TTL_MS)
def test_no_page_outlives_one_before_it(redis_process: RedisProcess, engines: list[Engine], ttl: TtlClass):
    engine = Engine(redis_process, ttl=ttl)
    engines.append(engine)
    server, pages = redis_process.client(), chain(300)

    def lives() -> list[int]:
        return [server.pttl(key) for key in KV.keys(pages) if server.exists(key)]

    engine.store_pages(pages[:100], 0)
    for key in KV.keys(pages[:100]):  # as if half of the class's time had gone by
        server.pexpire(key, max(1, server.pttl(key) - TTL_MS[ttl] // 2))
    engine.now += TTL_MS[ttl] / 2000
    engine.store_pages(pages[:200], 100)
    found = lives()
    assert len(found) == 200 and min(found) > TTL_MS[ttl] - 5_000
    # The time between two round trips is not the server's fault: half a second.
    assert all(deep <= shallow + 500 for shallow, deep in pairwise(found))
    # Within a step nothing needs to be prolonged again.
    before = server.info("commandstats")["cmdstat_pexpire"]["calls"]
    engine.store_pages(pages, 200)
    assert server.info("commandstats")["cmdstat_pexpire"]["calls"] - before == 1, "the index alone"
    found = lives()
    assert all(deep <= shallow + 500 for shallow, deep in pairwise(found))


def test_the_gateways_class_wins(engine: Engine, redis_process: RedisProcess):
    server, pages = redis_process.client(), chain(20)
    server.set(root_key(pages[0]), Root("acme", "5m").encode())
    engine.store_pages(pages[:10], 0)
    assert all(299_000 < server.pttl(key) <= 350_000 for key in KV.keys(pages[:10]))
    # A longer class reaches all that is before, a shorter one takes nothing away.
    server.set(root_key(pages[0]), Root("acme", "1h").encode())
    engine.now += 31
    engine.store_pages(pages, 10)
    assert all(server.pttl(key) > 3_599_000 for key in KV.keys(pages))
    server.set(root_key(pages[0]), Root("acme", "5m").encode())
    engine.now += 31
    engine.store_pages(pages, 10)
    assert all(server.pttl(key) > 3_500_000 for key in KV.keys(pages))


def test_a_record_that_is_none_is_a_counted_fault(engine: Engine, redis_process: RedisProcess):
    pages, before = chain(10), counted("longhaul_store_errors_total", kind="root")
    redis_process.client().set(root_key(pages[0]), b"x" * 256)
    engine.store_pages(pages, 0)
    assert counted("longhaul_store_errors_total", kind="root") == before + 1
    assert all(redis_process.client().pttl(key) > 80_000_000 for key in KV.keys(pages))


def test_bytes_are_counted_by_tenant_and_capped(engine: Engine, redis_process: RedisProcess):
    server, mine, other = redis_process.client(), chain(40), chain(40, (1, "other"))
    server.set(root_key(mine[0]), Root("acme", None, 3_000).encode())
    server.set(root_key(other[0]), Root("beta").encode())
    refused = counted("longhaul_store_refused_pages_total", pool="kv")
    assert engine.keeper.admits(KV, Span(mine[:20], []))
    engine.store_pages(mine[:20], 0)
    assert engine.keeper.admits(KV, Span(mine[20:30], mine[:20]))
    engine.store_pages(mine[:30], 20)
    assert not engine.keeper.admits(KV, Span(mine[30:], mine[:30]))
    engine.now += 60
    assert not engine.keeper.admits(KV, Span(mine[30:31], mine[:30]))
    assert engine.keeper.admits(KV, Span(other, []))
    assert counted("longhaul_store_refused_pages_total", pool="kv") == refused + 11
    # What was written twice counts once, and what expires counts no more.
    engine.store_pages(mine[:30], 0)
    (index,) = server.keys("*:held:kv.100:acme")
    assert server.zcard(index) == 30
    engine.now += 2 * TTL_MS["24h"] / 1000
    server.set(root_key(mine[0]), Root("acme", None, 3_000).encode())
    assert engine.keeper.admits(KV, Span(mine[30:], mine[:30]))


def test_a_limit_for_all_spares_whom_nobody_named(redis_process: RedisProcess, engines: list[Engine]):
    engine = Engine(redis_process, tenant_max_bytes=500)
    engines.append(engine)
    named, nobody = chain(10), chain(10, (1, "other"))
    redis_process.client().set(root_key(named[0]), Root("acme").encode())
    assert not engine.keeper.admits(KV, Span(named, []))
    assert engine.keeper.admits(KV, Span(named[:5], []))
    assert engine.keeper.admits(KV, Span(nobody, []))


def test_a_shortened_state_counts_until_it_expires(engine: Engine, redis_process: RedisProcess):
    server, pages = redis_process.client(), chain(40)
    for end in (10, 20, 30):
        engine.turn(pages[:end], end - 10)
    (index,) = server.keys("*:held:mamba.*")
    dates = sorted(score / 1000 - engine.now for _, score in server.zrange(index, 0, -1, withscores=True))
    assert len(dates) == 3 and dates[0] <= SUPERSEDED_S < 80_000 < dates[1]
    assert server.zrange(index, 0, 0) == [f"{pages[9]}:t0.2".encode()]


def test_what_sglang_does_not_say_is_not_guessed(engine: Engine, redis_process: RedisProcess):
    pages = chain(10)
    engine.keeper.written(KV, Span(pages), [True] * 10)
    engine.keeper.arrived(STATES, Span([pages[-1]]))
    assert engine.keeper.admits(KV, Span(pages))
    assert set(engine.keeper.lives_ms(Span(pages))) == {engine.keeper.lives_ms(Span(pages))[0]}
    assert engine.keeper.waiting == 0
    assert redis_process.client().dbsize() == 0


def test_a_superseded_state_that_is_read_has_its_life_again(engine: Engine, redis_process: RedisProcess):
    server, pages = redis_process.client(), chain(40)
    for end in (10, 20, 30):
        engine.turn(pages[:end], end - 10)
    span = Span([pages[9]], pages[:9])
    target = [[memoryview(bytearray(STATES.length))]]
    assert engine.values.fetch(STATES.values(span.keys), target, "mamba", 0) == [True]
    assert staying(server, pages) == [20, 30], "a life of 0 prolongs nothing"
    engine.keeper.read_state(STATES, span, [True])
    engine.settle()
    assert staying(server, pages) == [10, 20, 30]
    (index,) = server.keys("*:held:mamba.*")
    assert (
        min(score for _, score in server.zrange(index, 0, -1, withscores=True)) / 1000 > engine.now + 80_000
    )


def test_the_documented_commands_are_enough(redis_process: RedisProcess, engines: list[Engine]):
    readme = (Path(__file__).parents[2] / "cache_store" / "README.md").read_text()
    rule = re.search(r"^    (user engine .*)$", readme, re.MULTILINE)
    assert rule is not None, "cache_store/README.md has no ACL rule"
    words = rule[1].replace("PASSWORD", "pw").split()[1:]
    redis_process.client().execute_command("ACL", "SETUSER", *words)
    server, pages = redis_process.client(), chain(40)
    server.set(root_key(pages[0]), Root("acme", None, 10**12).encode())
    denied = counted("longhaul_store_errors_total", kind="noperm")
    engine = Engine(redis_process, url=f"unix://engine:pw@{redis_process.path}")
    engines.append(engine)
    for end in (10, 20, 30, 40):
        assert engine.keeper.admits(KV, Span(pages[end - 10 : end], pages[: end - 10]))
        engine.turn(pages[:end], end - 10)
    assert staying(server, pages) == [30, 40]
    target = [[memoryview(bytearray(100))] for _ in pages]
    assert all(engine.values.fetch(KV.values(pages), target, "kv", 10**9))
    server.setrange(KV.keys(pages)[0], 0, "spoilt")
    assert not all(engine.values.fetch(KV.values(pages), target, "kv", 10**9))
    assert counted("longhaul_store_errors_total", kind="noperm") == denied
    assert len(server.keys("*:held:*:acme")) == 2


@dataclass
class Branch:
    """A chain that grows: its pages, and the positions of the states that were stored on it."""

    pages: list[str]
    states: list[int]


@pytest.mark.parametrize("seed", range(4))
def test_sessions_that_branch_and_move_between_engines_keep_what_they_need(
    redis_process: RedisProcess, engines: list[Engine], seed: int
):
    rng, server = random.Random(seed), redis_process.client()
    engines += [Engine(redis_process, state_keep_every=40 * PAGE_TOKENS) for _ in range(3)]
    branches = [Branch([], [])]
    shared: list[tuple[Branch, Branch, int]] = []

    def grow(branch: Branch, name: str) -> None:
        engine, start = rng.choice(engines), len(branch.pages)
        state = branch.pages[-1] if branch.pages else ""
        for at in range(rng.randint(1, 12)):
            state = hashlib.sha256(f"{state}{name}{at}".encode()).hexdigest()
            branch.pages.append(state)
        engine.turn(branch.pages, start)
        branch.states.append(len(branch.pages))

    for step in range(60):
        branch = rng.choice(branches)
        alive = [at for at in branch.states if server.exists(STATES.keys([branch.pages[at - 1]])[0])]
        if len(alive) > 1 and rng.random() < 0.15:
            # Another goes on from one of its states, and may share pages with it beyond that.
            state = rng.choice(alive[:-1])
            leaves_at = rng.randint(state, next(at for at in branch.states if at > state) - 1)
            read = Span([branch.pages[state - 1]], branch.pages[: state - 1])
            rng.choice(engines).keeper.read_state(STATES, read, [True])
            other = Branch(branch.pages[:leaves_at], [at for at in branch.states if at <= state])
            branches.append(other)
            shared.append((branch, other, state))
            branch = other
        for engine in engines:
            engine.settle()
        grow(branch, f"{seed} {step}")
    for branch in branches:
        if len(branch.states) > 1:
            assert set(branch.states[-2:]) <= set(staying(server, branch.pages))
        stay = [0, *staying(server, branch.pages)]
        # At no page more is to be computed again than a turn beyond what an operator asked for.
        assert all(b - a <= 40 + 2 * 12 for a, b in pairwise(stay))
    assert shared
    for one, other, state in shared:
        assert state in staying(server, one.pages) and state in staying(server, other.pages)
    total = sum(len(set(branch.states)) for branch in branches)
    assert sum(server.pttl(key) > SUPERSEDED_S * 1000 for key in server.keys("*:mamba:*:t0.2")) < total / 2
