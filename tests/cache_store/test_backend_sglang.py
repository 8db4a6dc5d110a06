"""The backend as SGLang's HiCache controller loads and calls it, over SGLang's own host pools."""

import hashlib
import json
import random
import signal
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from host_pools import PAGE, draft_pool, kv_pool, page_bytes, randomize, state_pool
from prometheus_client import REGISTRY
from redis_process import RedisProcess
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    count_pool_hits,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from cache_store.backend import RedisStore
from cache_store.roots import root_page

pytestmark = pytest.mark.sglang

TIMEOUT_S = 0.5
MAMBA, DRAFT = PoolName.MAMBA, PoolName.DRAFT


def write_checkpoint(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    payload = random.Random(seed).randbytes(64)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + payload)
    (directory / "config.json").write_text('{"architectures": ["KimiK3ForConditionalGeneration"]}')
    return directory


@pytest.fixture(autouse=True)
def engine(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Publish an engine's arguments, as its process does before it makes its pools."""
    saved = get_context()._server_args

    def publish(**arguments: Any) -> None:
        checkpoint = write_checkpoint(tmp_path / "model")
        get_context().set_server_args(ServerArgs(model_path=str(checkpoint), **arguments))

    publish()
    yield publish
    while Engine.running:
        Engine.running.pop().store.close()
    if saved is not None:
        get_context().set_server_args(saved)


class Engine:
    """One rank of an engine with its host pools and its store."""

    running: ClassVar[list["Engine"]] = []

    def __init__(
        self,
        process: RedisProcess,
        *,
        kv: Any = None,
        states: Any = None,
        draft: Any = None,
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        **extra: Any,
    ) -> None:
        self.kv = kv or kv_pool()
        self.states = states or state_pool()
        self.draft = draft
        self.prefix: list[str] = []
        settings = {
            "backend_name": "longhaul",
            "module_path": "cache_store.backend",
            "class_name": "RedisStore",
            "interface_v1": 1,
            "url": process.unix_url,
            "timeout_s": TIMEOUT_S,
            "breaker_cooldown_s": 0.1,
            "drain_s": 0,
            **extra,
        }
        config = HiCacheStorageConfig(
            tp_rank=tp[0],
            tp_size=tp[1],
            pp_rank=pp[0],
            pp_size=pp[1],
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=True,
            is_page_first_layout=False,
            model_name="kimi-k3",
            extra_config=settings,
        )
        store = StorageBackendFactory.create_backend("dynamic", config, self.kv)
        assert isinstance(store, RedisStore)
        self.store = store
        self.running.append(self)
        store.register_mem_pool_host(self.kv)
        store.register_mem_host_pool_v2(self.kv, PoolName.KV)
        store.register_mem_host_pool_v2(self.states, MAMBA)
        store.on_host_pools_registered()
        if draft is not None:  # a sidecar comes after the burst
            store.register_mem_host_pool_v2(draft, DRAFT)

    def before(self, keys: list[str], covered: int = 0) -> HiCacheStorageExtraInfo:
        """The chain before the last pages of `keys`, as SGLang's controller gives it."""
        return HiCacheStorageExtraInfo(prefix_keys=[*self.prefix, *keys[: len(keys) - covered]])

    def transfers(self, keys: list[str], starts: list[int], state_slots: list[int]) -> list[PoolTransfer]:
        found = []
        if state_slots:
            found.append(
                PoolTransfer(
                    name=MAMBA,
                    host_indices=torch.tensor(state_slots),
                    keys=keys[-len(state_slots) :],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        if self.draft is not None:
            found.append(PoolTransfer(name=DRAFT, host_indices=rows(starts), keys=keys))
        return found

    def backup(self, keys: list[str], starts: list[int], state_slots: list[int]) -> None:
        """As the backup thread does: the sidecars, then the KV pages; a state for the last pages."""
        for transfer in self.transfers(keys, starts, state_slots):
            info = self.before(keys, len(transfer.keys or ()))
            assert all(self.store.batch_set_v2([transfer], info)[transfer.name])
        assert all(self.store.batch_set_v1(keys, rows(starts), self.before(keys, len(keys))))

    def lookup(self, keys: list[str]) -> tuple[int, list[int]]:
        """As the prefetch thread does: pages of the longest restorable prefix, and all that are."""
        queries = [PoolTransfer(name=MAMBA, keys=["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
        if self.draft is not None:
            queries.append(PoolTransfer(name=DRAFT))
        result = self.store.batch_exists_v2(keys, queries)
        assert result.restorable_prefix_pages is not None or result.kv_hit_pages == 0
        return result.kv_hit_pages, result.restorable_prefix_pages or []

    def restore(self, keys: list[str], starts: list[int], state_slot: int) -> bool:
        """As the prefetch's I/O thread does: KV and draft pages, then the state, all or nothing."""
        done = self.store.batch_get_v1(keys, rows(starts), self.before(keys, len(keys)))
        sidecars: dict[str, list[bool]] = {}
        for transfer in self.transfers(keys, starts, [state_slot]):
            sidecars |= self.store.batch_get_v2([transfer], self.before(keys, len(transfer.keys or ())))
        hits = count_pool_hits(sidecars)
        expected = {MAMBA: 1, DRAFT: len(keys)} if self.draft is not None else {MAMBA: 1}
        return all(done) and hits == expected


def rows(starts: list[int]) -> torch.Tensor:
    return torch.tensor([start + at for start in starts for at in range(PAGE)], dtype=torch.int64)


def chain(count: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed}{index}".encode()).hexdigest() for index in range(count)]


STARTS = [PAGE * page for page in (3, 1, 7, 5)]
OTHER_STARTS = [PAGE * page for page in (2, 8, 0, 6)]


def test_a_session_survives_its_engine(redis_process: RedisProcess):
    keys = chain(4)
    first = Engine(redis_process, draft=draft_pool())
    first.backup(keys, STARTS, [5])
    second = Engine(redis_process, draft=draft_pool())
    assert second.lookup(keys) == (4, [4])
    assert second.restore(keys, OTHER_STARTS, 9)
    for old, new in zip(STARTS, OTHER_STARTS, strict=True):
        assert page_bytes(second.kv, new) == page_bytes(first.kv, old)
        assert page_bytes(second.draft, new) == page_bytes(first.draft, old)
    assert page_bytes(second.states, 9) == page_bytes(first.states, 5)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_every_layout(redis_process: RedisProcess, layout: str):
    keys, states = chain(4), "page_first" if layout == "layer_first" else layout
    first = Engine(redis_process, kv=kv_pool(layout), states=state_pool(states, side_state=True))
    first.backup(keys, STARTS, [5])
    second = Engine(redis_process, kv=kv_pool(layout), states=state_pool(states, side_state=True))
    assert second.restore(keys, OTHER_STARTS, 9)
    assert page_bytes(second.kv, OTHER_STARTS[2]) == page_bytes(first.kv, STARTS[2])
    assert page_bytes(second.states, 9) == page_bytes(first.states, 5)


def test_only_boundaries_with_a_state_are_restorable(redis_process: RedisProcess):
    engine, keys = Engine(redis_process), chain(9)
    starts = [PAGE * page for page in range(9)]
    engine.store.batch_set_v1(keys[:8], rows(starts[:8]))
    for page in (2, 5, 9):
        engine.store.batch_set_v2(
            [PoolTransfer(name=MAMBA, host_indices=torch.tensor([page]), keys=[keys[page - 1]])]
        )
    # The state at page 9 lies behind a missing KV page.
    assert engine.lookup(keys) == (5, [2, 5])
    assert engine.lookup(keys[:4]) == (2, [2])
    assert engine.lookup(keys[:1]) == (0, [])
    assert engine.lookup(chain(3, "other")) == (0, [])
    assert engine.store.batch_exists(keys) == 8
    assert engine.store.exists(keys[0]) and not engine.store.exists(keys[8])


def test_a_window_of_several_states_must_be_whole(redis_process: RedisProcess):
    engine, keys = Engine(redis_process), chain(6)
    engine.store.batch_set_v1(keys, rows([PAGE * page for page in range(6)]))
    for page in (1, 3, 4, 6):
        engine.store.batch_set_v2(
            [PoolTransfer(name=MAMBA, host_indices=torch.tensor([page]), keys=[keys[page - 1]])]
        )
    query = PoolTransfer(name=MAMBA, keys=["x", "y"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert engine.store.batch_exists_v2(keys, [query]).restorable_prefix_pages == [1, 4]


def test_a_lookup_is_one_round_trip(redis_process: RedisProcess):
    engine = Engine(redis_process, draft=draft_pool())
    engine.lookup(chain(1))
    before = redis_process.client().info("commandstats")
    engine.lookup(chain(2000))
    after = redis_process.client().info("commandstats")
    calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    own = {
        "cmdstat_info",
        "cmdstat_hello",
        "cmdstat_client",
        "cmdstat_client|setinfo",
    }  # of the client that asks
    assert {name: count for name, count in calls.items() if count and name not in own} == {
        "cmdstat_strlen": 6000
    }


DIFFERENT: dict[str, Callable[[RedisProcess], Engine]] = {
    "KV dtype": lambda p: Engine(p, kv=kv_pool(dtype=torch.float16)),
    "KV width": lambda p: Engine(p, kv=kv_pool(dtype=torch.float32, width=24)),
    "state dtype": lambda p: Engine(p, states=state_pool(dtype=torch.bfloat16)),
    "state shape": lambda p: Engine(p, states=state_pool(width=10)),
    "layout": lambda p: Engine(p, kv=kv_pool("page_first")),
    "TP size": lambda p: Engine(p, tp=(0, 2)),
    "PP size": lambda p: Engine(p, pp=(0, 2)),
    "salt": lambda p: Engine(p, salt="blue"),
    "stored dtype": lambda p: Engine(p, state_dtype="bfloat16"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_engines_that_differ_share_nothing(redis_process: RedisProcess, what: str):
    keys = chain(4)
    Engine(redis_process).backup(keys, STARTS, [5])
    other = DIFFERENT[what](redis_process)
    assert other.lookup(keys) == (0, [])
    assert not any(other.store.batch_get_v1(keys, rows(STARTS)))
    other.backup(keys, STARTS, [5])
    assert Engine(redis_process).lookup(keys) == (4, [4])


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"device": "cpu"},
        {"linear_attn_backend": "flashinfer"},
        {"load_format": "dummy", "random_seed": 1},
    ],
)
def test_engines_that_compute_otherwise_share_nothing(
    redis_process: RedisProcess, engine: Callable[..., None], arguments: dict[str, Any]
):
    keys = chain(4)
    Engine(redis_process).backup(keys, STARTS, [5])
    engine(**arguments)
    assert Engine(redis_process).lookup(keys) == (0, [])


def test_other_weights_share_nothing(redis_process: RedisProcess, tmp_path: Path):
    keys = chain(4)
    Engine(redis_process).backup(keys, STARTS, [5])
    tuned = write_checkpoint(tmp_path / "tuned", seed=1)
    assert Engine(redis_process, model_path=str(tuned)).lookup(keys) == (0, [])
    copy = write_checkpoint(tmp_path / "copy")
    assert Engine(redis_process, model_path=str(copy)).lookup(keys) == (4, [4])


def test_ranks_share_pages_and_own_their_states(redis_process: RedisProcess):
    keys = chain(4)
    ranks = [Engine(redis_process, tp=(rank, 2)) for rank in range(2)]
    assert ranks[0].store.batch_set_v1(keys, rows(STARTS)) == [True] * 4
    for rank in ranks:
        assert rank.lookup(keys) == (0, [])
        assert rank.store.batch_set_v2(rank.transfers(keys, STARTS, [5])) == {MAMBA: [True]}
    again = [Engine(redis_process, tp=(rank, 2)) for rank in range(2)]
    for old, new in zip(ranks, again, strict=True):
        assert new.lookup(keys) == (4, [4])
        assert new.restore(keys, OTHER_STARTS, 2)
        assert page_bytes(new.states, 2) == page_bytes(old.states, 5)
        assert page_bytes(new.kv, OTHER_STARTS[0]) == page_bytes(ranks[0].kv, STARTS[0])


def test_a_missing_draft_page_is_zeros_and_no_miss(redis_process: RedisProcess):
    keys = chain(4)
    Engine(redis_process).backup(keys, STARTS, [5])
    engine = Engine(redis_process, draft=draft_pool())
    assert engine.lookup(keys) == (4, [4])
    assert engine.restore(keys, OTHER_STARTS, 9)
    assert not any(any(page_bytes(engine.draft, start)) for start in OTHER_STARTS)
    assert any(page_bytes(engine.draft, STARTS[0]))


def test_another_draft_keeps_the_targets_pages(redis_process: RedisProcess, tmp_path: Path, engine: Any):
    keys = chain(4)
    drafts = [str(write_checkpoint(tmp_path / name, seed)) for name, seed in (("d1", 1), ("d2", 2))]
    engine(speculative_draft_model_path=drafts[0])
    first = Engine(redis_process, draft=draft_pool())
    first.backup(keys, STARTS, [5])
    assert first.store.batch_exists_v2(keys, [PoolTransfer(name=DRAFT)]).extra_pool_hit_pages[DRAFT] == 4
    engine(speculative_draft_model_path=drafts[1])
    second = Engine(redis_process, draft=draft_pool())
    result = second.store.batch_exists_v2(keys, [PoolTransfer(name=DRAFT)])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages.get(DRAFT)) == (4, None)


def test_corrupted_states_are_misses_and_never_promised_again(redis_process: RedisProcess):
    server, keys = redis_process.client(), chain(4)
    Engine(redis_process).backup(keys, STARTS, [5])
    engine = Engine(redis_process)
    (state,) = server.keys("*:mamba:*")
    server.set(state, bytes(server.strlen(state)))
    assert engine.lookup(keys) == (4, [4])
    assert not engine.restore(keys, OTHER_STARTS, 9)
    assert engine.lookup(keys) == (0, [])


def test_a_dead_store_costs_misses_and_raises_nothing(redis_process: RedisProcess):
    engine, keys = Engine(redis_process, draft=draft_pool()), chain(4)
    engine.backup(keys, STARTS, [5])
    redis_process.signal(signal.SIGSTOP)
    started = time.monotonic()
    assert engine.lookup(keys) == (0, [])
    assert engine.store.batch_get_v1(keys, rows(STARTS)) == [False] * 4
    assert engine.store.batch_exists(keys) == 0
    assert engine.store.batch_get_v2(engine.transfers(keys, STARTS, [5]))[MAMBA] == [False]
    assert engine.store.get(keys[0], engine.kv.get_dummy_flat_data_page()) is None
    # What can't be written is taken over for later.
    assert engine.store.batch_set_v1(chain(4, "late"), rows(STARTS)) == [True] * 4
    assert time.monotonic() - started < 3 * TIMEOUT_S + 1
    redis_process.signal(signal.SIGCONT)
    until = time.monotonic() + 10
    while engine.store.batch_exists(chain(4, "late")) != 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    fresh = Engine(redis_process)
    assert fresh.store.batch_get_v1(chain(4, "late"), rows(OTHER_STARTS)) == [True] * 4
    assert page_bytes(fresh.kv, OTHER_STARTS[1]) == page_bytes(engine.kv, STARTS[1])


def test_a_late_write_keeps_what_the_page_was(redis_process: RedisProcess):
    engine, keys = Engine(redis_process, breaker_failures=99), chain(4)
    before = page_bytes(engine.kv, STARTS[0])
    redis_process.signal(signal.SIGSTOP)
    assert all(engine.store.batch_set_v1(keys, rows(STARTS)))
    randomize(engine.kv)
    redis_process.signal(signal.SIGCONT)
    until = time.monotonic() + 10
    while engine.store.batch_exists(keys) != 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all(engine.store.batch_get_v1(keys, rows(STARTS)))
    assert page_bytes(engine.kv, STARTS[0]) == before


def test_what_makes_no_sense_is_a_miss_too(redis_process: RedisProcess):
    engine, keys = Engine(redis_process), chain(4)
    assert engine.store.batch_get_v1(keys, torch.arange(3)) == [False] * 4
    assert engine.store.batch_set_v1(keys, rows(STARTS[:2])) == [False] * 4
    assert engine.store.batch_get_v2([PoolTransfer(name=PoolName.SWA, keys=keys)]) == {
        PoolName.SWA: [False] * 4
    }
    assert engine.store.batch_get_v2([PoolTransfer(name=MAMBA, keys=keys)]) == {MAMBA: [False] * 4}
    assert engine.store.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA)]).kv_hit_pages == 0
    grouped = PoolTransfer(name=MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert engine.store.batch_exists_v2(keys, [grouped]).kv_hit_pages == 0
    assert engine.store.batch_exists([]) == 0
    assert engine.store.batch_get_v1([], rows([])) == []


def test_single_pages_are_the_same_pages(redis_process: RedisProcess):
    engine, keys = Engine(redis_process), chain(2)
    page = engine.kv.get_data_page(STARTS[0], flat=True)
    assert engine.store.set(keys[0], page)
    assert engine.store.batch_get_v1([keys[0]], rows([OTHER_STARTS[0]])) == [True]
    assert page_bytes(engine.kv, OTHER_STARTS[0]) == page_bytes(engine.kv, STARTS[0])
    read = engine.store.get(keys[0], engine.kv.get_dummy_flat_data_page())
    assert read is not None and torch.equal(read.view(torch.uint8), page.view(torch.uint8))
    assert engine.store.get(keys[1], engine.kv.get_dummy_flat_data_page()) is None
    assert not engine.store.batch_set(keys, [page, page[:-1]])


def test_clear_takes_this_engines_values_alone(redis_process: RedisProcess):
    mine, other = Engine(redis_process, draft=draft_pool()), Engine(redis_process, salt="other")
    keys = chain(4)
    mine.backup(keys, STARTS, [5])
    other.backup(keys, STARTS, [5])
    mine.store.clear()
    assert mine.lookup(keys) == (0, [])
    assert other.lookup(keys) == (4, [4])
    assert {key.split(b":")[1] for key in redis_process.client().scan_iter()} == {
        other.store._pools["kv"].space[:8].hex().encode()
    }


def test_values_expire(redis_process: RedisProcess):
    engine = Engine(redis_process, ttl="5m")
    engine.backup(chain(4), STARTS, [5])
    server = redis_process.client()
    values = [*server.keys("*:kv:*"), *server.keys("*:mamba:*")]
    assert len(values) == 5
    assert all(299_000 < server.pttl(key) <= 350_000 for key in values)


def test_stats_are_handed_over_once(redis_process: RedisProcess):
    engine = Engine(redis_process)
    engine.backup(chain(4), STARTS, [5])
    engine.store.batch_get_v1(chain(4), rows(STARTS))
    stats = engine.store.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert stats.prefetch_bandwidth[0] > 0
    assert engine.store.get_stats().prefetch_pgs == []


def test_hits_are_counted_by_pool(redis_process: RedisProcess):
    def hit(pool: str) -> float:
        labels = {"pool": pool, "outcome": "hit"}
        return REGISTRY.get_sample_value("longhaul_store_lookup_pages_total", labels) or 0.0

    engine = Engine(redis_process)
    engine.backup(chain(4), STARTS, [5])
    before = hit("kv"), hit("mamba")
    engine.lookup(chain(4))
    assert (hit("kv"), hit("mamba")) == (before[0] + 4, before[1] + 4)


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [({"interface_v1": 0}, "interface_v1"), ({"url": "http://x"}, "redis://"), ({"bogus": 1}, "bogus")],
)
def test_settings_that_make_no_sense_stop_the_start(redis_process: RedisProcess, extra: Any, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        Engine(redis_process, **extra)


def test_a_checkpoint_that_is_none_stops_the_start(redis_process: RedisProcess, tmp_path: Path):
    with pytest.raises(ValueError, match=r"config\.json"):
        Engine(redis_process, model_path=str(tmp_path))


def test_a_store_that_is_down_does_not_stop_the_start(redis_process: RedisProcess):
    redis_process.kill()
    engine = Engine(redis_process)
    assert engine.lookup(chain(4)) == (0, [])


def test_the_gateway_and_sglang_name_the_first_page_alike():
    ids = [7, 2**20, *range(126)]
    for salt in (None, "", "acme", "ä"):
        key = RadixKey(array("q", ids), cache_salt=salt)
        assert root_page(ids, salt, 64) == get_storage_hash_str(key, page_size=64)[0]


def test_narrowed_states_are_read_by_their_like(redis_process: RedisProcess):
    keys = chain(4)
    first = Engine(redis_process, state_dtype="bfloat16")
    first.backup(keys, STARTS, [5])
    again = Engine(redis_process, state_dtype="bfloat16")
    assert again.lookup(keys) == (4, [4])
    assert again.restore(keys, OTHER_STARTS, 9)
    assert page_bytes(again.kv, OTHER_STARTS[0]) == page_bytes(first.kv, STARTS[0])
    third = Engine(redis_process, state_dtype="bfloat16")
    assert third.restore(keys, OTHER_STARTS, 9)
    assert page_bytes(third.states, 9) == page_bytes(again.states, 9)
