"""SGLang's real host pools, small, on the CPU, filled with random bytes."""

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE = 4
LAYERS = 3
CPU = torch.device("cpu")


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def randomize(pool: Any) -> None:
    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]
    for buffer in buffers:
        flat = buffer.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def kv_pool(
    layout: str = "page_first_direct", dtype: torch.dtype = torch.bfloat16, pages: int = 12, width: int = 24
) -> MLATokenToKVPoolHost:
    buffers = tuple(torch.zeros(8, 1, width, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=width - 8,
        qk_rope_head_dim=8,
        kv_cache_dim=width,
        dtype=dtype,
        device=CPU,
    )
    pool = MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=pages * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    randomize(pool)
    return pool


def draft_pool(layout: str = "page_first_direct", heads: int = 2, pages: int = 12) -> MHATokenToKVPoolHost:
    k, v = (tuple(torch.zeros(8, heads, 16) for _ in range(LAYERS)) for _ in range(2))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=16,
        v_head_dim=16,
        dtype=torch.float32,
        device=CPU,
    )
    pool = MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=pages * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        pool_label="draft",
    )
    randomize(pool)
    return pool


def state_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.float32,
    slots: int = 12,
    *,
    width: int = 5,
    side_state: bool = False,
) -> MambaPoolHost:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 7, 2, 4, width, dtype=dtype),
        conv=(torch.zeros(LAYERS, 7, 6, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(7, 11, dtype=torch.uint8),) if side_state else (),
    )
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)
    randomize(pool)
    return pool


def page_bytes(pool: Any, start: int) -> bytes:
    """What SGLang itself takes for the content of the page that starts at `start`."""
    return pool.get_data_page(start, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
