import random
from typing import Any

import pytest
import torch
from host_pools import LAYERS, PAGE, draft_pool, kv_pool, page_bytes, randomize, state_pool

from cache_store.pages import HostPages

pytestmark = pytest.mark.sglang

POOLS = {
    "kv page_first": lambda: kv_pool("page_first"),
    "kv page_first_direct": lambda: kv_pool("page_first_direct"),
    "kv layer_first": lambda: kv_pool("layer_first"),
    "kv float32": lambda: kv_pool(dtype=torch.float32),
    "kv fp8": lambda: kv_pool(dtype=torch.float8_e4m3fn),
    "draft page_first": lambda: draft_pool("page_first"),
    "draft page_first_direct": lambda: draft_pool("page_first_direct"),
    "states": state_pool,
    "states bfloat16": lambda: state_pool(dtype=torch.bfloat16),
    "states with side data": lambda: state_pool(side_state=True),
}


def indices(starts: list[int], page: int) -> torch.Tensor:
    return torch.tensor([start + at for start in starts for at in range(page)], dtype=torch.int64)


@pytest.mark.parametrize("name", POOLS)
def test_pages_move_whole_and_touch_no_other(name: str):
    source, target = POOLS[name](), POOLS[name]()
    page = source.page_size
    slots = list(range(0, 10 * page, page))
    before = {start: page_bytes(target, start) for start in slots}
    from_starts, to_starts = random.Random(name).sample(slots, 3), random.Random(2).sample(slots, 3)
    theirs = HostPages("p", source).to_read(indices(from_starts, page))
    mine = HostPages("p", target).to_fill(indices(to_starts, page))
    for a, b in zip(theirs, mine, strict=True):
        assert a.nbytes == b.nbytes == HostPages("p", source).geometry.page_bytes
        payload = b"".join(a.segments)
        at = 0
        for segment in b.segments:
            segment[:] = payload[at : at + len(segment)]
            at += len(segment)
        b.commit()
    for start in slots:
        expected = before[start]
        if start in to_starts:
            expected = page_bytes(source, from_starts[to_starts.index(start)])
        assert page_bytes(target, start) == expected


@pytest.mark.parametrize("name", [name for name in POOLS if "side" not in name])
def test_direct_pages_are_the_pools_own_memory(name: str):
    pool = POOLS[name]()
    pages = HostPages("p", pool)
    assert pages.is_direct
    page = pages.to_read(indices([2 * pool.page_size], pool.page_size))[0]
    randomize(pool)
    joined = b"".join(page.segments)
    assert sorted(joined) == sorted(page_bytes(pool, 2 * pool.page_size))


def test_states_with_side_data_are_copied():
    pages = HostPages("mamba", state_pool(side_state=True))
    assert not pages.is_direct


def test_clearing_fills_with_zeros():
    for pool in (kv_pool(), state_pool(side_state=True)):
        HostPages("p", pool).to_fill(indices([pool.page_size], pool.page_size))[0].clear()
        assert not any(page_bytes(pool, pool.page_size))
        assert any(page_bytes(pool, 0))


def test_views_outlive_the_pool():
    pages = HostPages("kv", kv_pool()).to_read(indices([0], PAGE))
    segments = pages[0].segments
    before = b"".join(segments)
    del pages
    assert b"".join(segments) == before


@pytest.mark.parametrize("broken", [torch.arange(PAGE + 1), torch.arange(4000 * PAGE, 4001 * PAGE)])
def test_indices_that_are_no_pages_are_refused(broken: torch.Tensor):
    with pytest.raises(ValueError, match=r"not pages|outside"):
        HostPages("kv", kv_pool()).to_read(broken)


def test_a_pool_without_memory_is_refused():
    class Logical:
        kv_buffer = None
        page_size = PAGE

    with pytest.raises(ValueError, match="has no memory"):
        HostPages("kv", Logical())


def geometry(pool: Any) -> object:
    return HostPages("p", pool).geometry


def test_the_geometry_says_what_pages_are_made_of():
    kv = HostPages("kv", kv_pool(dtype=torch.float32)).geometry
    assert (kv.kind, kv.layout, kv.page_tokens) == ("MLATokenToKVPoolHost", "page_first_direct", PAGE)
    assert kv.layers == (0, LAYERS, LAYERS)
    assert kv.page_bytes == LAYERS * PAGE * 24 * 4
    states = HostPages("mamba", state_pool()).geometry
    assert states.component_bytes == (LAYERS * 2 * 4 * 5 * 4, LAYERS * 6 * 3 * 2)
    assert ("temporal", "torch.float32", (2, 4, 5)) in states.arrays


def test_capacity_is_no_part_of_the_geometry():
    assert geometry(kv_pool(pages=12)) == geometry(kv_pool(pages=40))
    assert geometry(state_pool(slots=12)) == geometry(state_pool(slots=40))


def test_everything_else_is():
    kinds = [make() for make in POOLS.values()]
    kinds += [kv_pool(width=32), draft_pool(heads=1), state_pool(width=6)]
    found = [geometry(pool) for pool in kinds]
    assert len(set(found)) == len(found)


def test_narrowed_states_take_half_and_come_back_rounded():
    source, target = state_pool(), state_pool()
    torch.manual_seed(0)
    for pool in (source, target):
        temporal = pool.kv_buffer[0] if isinstance(pool.kv_buffer, list) else pool.kv_buffer
        assert temporal.dtype == torch.float32
        temporal.copy_(torch.randn(temporal.shape))
    exact, half = HostPages("mamba", source), HostPages("mamba", source, is_narrowed=True)
    temporal_bytes, conv_bytes = exact.geometry.component_bytes
    assert half.geometry.component_bytes == (temporal_bytes // 2, conv_bytes), "conv is bfloat16 already"
    assert half.geometry != exact.geometry and not half.is_direct
    payload = b"".join(half.to_read(torch.tensor([3]))[0].segments)
    page = HostPages("mamba", target, is_narrowed=True).to_fill(torch.tensor([5]))[0]
    assert page.nbytes == len(payload)
    at = 0
    for segment in page.segments:
        segment[:] = payload[at : at + len(segment)]
        at += len(segment)
    before = page_bytes(target, 5), page_bytes(target, 4)
    assert page_bytes(target, 5) == before[0], "nothing moves before the commit"
    page.commit()
    assert page_bytes(target, 4) == before[1]
    there = [
        b"".join(bytes(part) for part in HostPages("m", pool).to_read(torch.tensor([slot]))[0].segments)
        for pool, slot in ((source, 3), (target, 5))
    ]
    old, new = (torch.frombuffer(bytearray(part[:temporal_bytes]), dtype=torch.float32) for part in there)
    assert torch.equal(new, old.to(torch.bfloat16).to(torch.float32)) and not torch.equal(new, old)
    assert there[0][temporal_bytes:] == there[1][temporal_bytes:]


@pytest.mark.parametrize("pool", [state_pool(dtype=torch.bfloat16), state_pool(side_state=True)])
def test_what_cannot_be_narrowed_says_so(pool: Any):
    with pytest.raises(ValueError, match="exact"):
        HostPages("mamba", pool, is_narrowed=True)
