"""SGLang attention backend over the paged torch attention: absorbed MLA, and the draft's GQA."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from model.cpu.attention import attend

# Below this many tokens a batch runs on one thread: starting and joining a second takes longer than it saves.
_SPREAD_TOKENS = 256


@cache
def _configured_threads() -> int:
    """Threads that this process was given; asked first before any batch has changed their number."""
    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Lengths of a batch's requests.

    Attributes:
        queries: new tokens of each request.
        keys: tokens of each request once its new ones are stored.
        rows: row of each request in the table of token slots.
    """

    queries: list[int]
    keys: list[int]
    rows: list[int]

    def __post_init__(self) -> None:
        assert len(self.queries) == len(self.keys) == len(self.rows), "one entry a request"
        assert all(0 <= q <= k for q, k in zip(self.queries, self.keys, strict=True)), "keys include queries"


class CpuAttentionBackend(AttentionBackend):
    """Extend, decode and target verify for MLA (absorbed, NoPE) and grouped heads."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._threads = _configured_threads()
        self._shape = BatchShape([], [], [])
        self._slots: list[Tensor] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch's lengths once for all layers, and choose the threads that will run them."""
        size = forward_batch.batch_size
        mode = forward_batch.forward_mode
        keys: list[int] = forward_batch.seq_lens[:size].tolist()
        if mode.is_decode_or_idle():
            queries = [min(1, k) for k in keys]
        elif mode.is_target_verify():
            queries = _verify_lengths(forward_batch.spec_info, size)
            keys = [k + q for k, q in zip(keys, queries, strict=True)]
        else:
            queries = forward_batch.extend_seq_lens[:size].tolist()
        self._shape = BatchShape(queries, keys, forward_batch.req_pool_indices[:size].tolist())
        self._slots = None
        torch.set_num_threads(self._threads if sum(queries) >= _SPREAD_TOKENS else 1)

    def _token_slots(self) -> list[Tensor]:
        """Pool slots of each request's tokens, in order.

        Read when the first layer attends: a draft's slots enter the table after the metadata are made.
        """
        if self._slots is None:
            table, shape = self.req_to_token_pool.req_to_token, self._shape
            self._slots = [
                table[row, :length].long() for row, length in zip(shape.rows, shape.keys, strict=True)
            ]
        return self._slots

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """No graphs on a CPU; the interface wants a number."""
        return 1

    def support_triton(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  # inferred True
        """Triton doesn't run here."""
        return False

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        """Store the new keys and values, then attend: [T, H * Dv]."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        # Absorbed MLA stores one latent row a token; its value is the row's leading part.
        shared = keys.data_ptr() == values.data_ptr()
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        start = 0
        for count, slots in zip(self._shape.queries, self._token_slots(), strict=True):
            if count == 0:
                continue
            rows = slice(start, start + count)
            key = keys[slots]
            value = key[..., : layer.v_head_dim] if shared else values[slots]
            out[rows] = attend(query[rows], key, value, scale=layer.scaling, causal=causal, shared=shared)
            start += count
        return out.view(out.shape[0], -1)

    forward_decode = forward_extend


def _verify_lengths(spec_info: Any, size: int) -> list[int]:
    """Draft tokens of each request under verification: one width for all, or a ragged layout."""
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is None:
        return [spec_info.draft_token_num] * size
    borders = layout.qo_indptr_device[: size + 1]
    return torch.diff(borders).tolist()
