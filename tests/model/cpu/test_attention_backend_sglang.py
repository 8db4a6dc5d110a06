"""The attention backend's reading of SGLang's batches: which tokens attend to which slots.

The pools and batches are the few attributes that the backend reads; the real ones come with a whole engine.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from model.cpu import backend as backend_module
from model.cpu.backend import CpuAttentionBackend

pytestmark = pytest.mark.sglang

HEADS, WIDTH, RANK = 4, 12, 8


class Pool:
    """One layer's latent rows [slots, 1, WIDTH]; the value is their leading part."""

    def __init__(self, slots: int) -> None:
        self.rows = torch.randn(slots, 1, WIDTH)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows[..., :RANK]

    def set_kv_buffer(self, layer: Any, where: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.rows[where.loc] = key


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    backend_module._configured_threads.cache_clear()
    yield
    torch.set_num_threads(before)
    backend_module._configured_threads.cache_clear()


@pytest.fixture
def table() -> torch.Tensor:
    """Slots of three requests' positions, scattered over the pool."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(120, generator=generator).view(3, 40).int()


def make(table: torch.Tensor) -> CpuAttentionBackend:
    torch.manual_seed(1)
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=Pool(120),
    )
    return CpuAttentionBackend(runner)


LAYER = SimpleNamespace(
    layer_id=0,
    tp_q_head_num=HEADS,
    qk_head_dim=WIDTH,
    v_head_dim=RANK,
    scaling=0.3,
    attn_type=AttentionType.DECODER,
)


def expected(
    backend: CpuAttentionBackend, table: torch.Tensor, query: torch.Tensor, batch: list[tuple[int, int, int]]
) -> torch.Tensor:
    """Attention of each token alone; a batch entry is a request's row, its new tokens and all its tokens."""
    outputs, token = [], 0
    for row, new, total in batch:
        for i in range(new):
            seen = backend.token_to_kv_pool.rows[table[row, : total - new + i + 1].long(), 0]
            weights = torch.softmax(query[token].view(HEADS, WIDTH) @ seen.t() * LAYER.scaling, dim=-1)
            outputs.append((weights @ seen[:, :RANK]).view(-1))
            token += 1
    return torch.stack(outputs)


def run(
    backend: CpuAttentionBackend, batch: SimpleNamespace, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    query, new = torch.randn(tokens, HEADS * WIDTH), torch.randn(tokens, 1, WIDTH)
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(query, new, new[..., :RANK], LAYER, batch)
    return query, out


def test_extend_reads_prefix_and_new_tokens(table: torch.Tensor) -> None:
    backend = make(table)
    requests = [(2, 3, 3), (0, 5, 20), (1, 1, 7)]
    locations = torch.cat([table[row, total - new : total] for row, new, total in requests]).long()
    batch = SimpleNamespace(
        batch_size=3,
        forward_mode=ForwardMode.EXTEND,
        seq_lens=torch.tensor([total for _, _, total in requests]),
        extend_seq_lens=torch.tensor([new for _, new, _ in requests]),
        req_pool_indices=torch.tensor([row for row, _, _ in requests]),
        out_cache_loc=locations,
    )
    query, out = run(backend, batch, 9)
    torch.testing.assert_close(out, expected(backend, table, query, requests), atol=1e-5, rtol=1e-5)


def test_decode_reads_everything_once(table: torch.Tensor) -> None:
    backend = make(table)
    requests = [(1, 1, 33), (2, 1, 1)]
    batch = SimpleNamespace(
        batch_size=2,
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.tensor([33, 1]),
        req_pool_indices=torch.tensor([1, 2]),
        out_cache_loc=torch.tensor([table[1, 32], table[2, 0]]).long(),
    )
    query, out = run(backend, batch, 2)
    torch.testing.assert_close(out, expected(backend, table, query, requests), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 3], [1, 4]])
def test_verify_attends_within_the_draft(table: torch.Tensor, lengths: list[int]) -> None:
    backend = make(table)
    prefixes = [10, 21]
    requests = [(row, new, old + new) for row, new, old in zip((0, 2), lengths, prefixes, strict=True)]
    layout = None
    if lengths[0] != lengths[1]:
        layout = SimpleNamespace(qo_indptr_device=torch.tensor([0, lengths[0], sum(lengths)]))
    locations = torch.cat([table[row, total - new : total] for row, new, total in requests]).long()
    batch = SimpleNamespace(
        batch_size=2,
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.tensor(prefixes),
        req_pool_indices=torch.tensor([0, 2]),
        out_cache_loc=locations,
        spec_info=SimpleNamespace(draft_token_num=3, ragged_verify_layout=layout),
    )
    query, out = run(backend, batch, sum(lengths))
    torch.testing.assert_close(out, expected(backend, table, query, requests), atol=1e-5, rtol=1e-5)


def test_slots_written_after_the_metadata_are_seen(table: torch.Tensor) -> None:
    """A draft allocates its slots between the two."""
    backend = make(table)
    batch = SimpleNamespace(
        batch_size=1,
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.tensor([5]),
        req_pool_indices=torch.tensor([1]),
        out_cache_loc=torch.tensor([7]),
    )
    backend.init_forward_metadata(batch)
    table[1, 4] = 7
    query, new = torch.randn(1, HEADS * WIDTH), torch.randn(1, 1, WIDTH)
    out = backend.forward_decode(query, new, new[..., :RANK], LAYER, batch)
    torch.testing.assert_close(out, expected(backend, table, query, [(1, 1, 5)]), atol=1e-5, rtol=1e-5)


def test_large_batches_alone_are_spread_over_threads(table: torch.Tensor) -> None:
    torch.set_num_threads(2)
    wide = torch.arange(1024).view(2, 512).int()
    backend = make(wide)
    batch = SimpleNamespace(
        batch_size=1,
        forward_mode=ForwardMode.EXTEND,
        seq_lens=torch.tensor([300]),
        extend_seq_lens=torch.tensor([300]),
        req_pool_indices=torch.tensor([0]),
    )
    backend.init_forward_metadata(batch)
    assert torch.get_num_threads() == 2
    batch.extend_seq_lens = torch.tensor([20])
    backend.init_forward_metadata(batch)
    assert torch.get_num_threads() == 1
    batch.extend_seq_lens = torch.tensor([300])
    make(wide).init_forward_metadata(batch)
    assert torch.get_num_threads() == 2, "a later backend knows the threads that the process was given"
