"""How SGLang parts a node's memory, by its own rules: weights, KV tokens, state slots, the host tier.

`sglang.srt.mem_cache.kv_cache_configurator`: what `--mem-fraction-static` leaves beside the weights is parted
by `--mamba-full-memory-ratio` (states to KV); one slot of states is padding. MLA KV is whole on every rank,
states are split by heads.
"""

from dataclasses import dataclass
from typing import Final

from model.capacity.geometry import Geometry, KvType, StateType
from model.capacity.machine import Machine
from model.profile import Profile

# CUDA context, NCCL and symmetric memory buffers of a rank: an allowance, not a measurement.
RUNTIME_BYTES: Final = 2_000_000_000
# SGLang's fallbacks for arguments that a profile leaves out.
MEMORY_FRACTION: Final = 0.85
STATE_RATIO: Final = 0.9
TRACK_TOKENS: Final = 256
# `--mamba-radix-cache-strategy extra_buffer`: slots that a running request takes.
SLOTS_PER_REQUEST: Final = 5
# `--chunked-prefill-size` left out: by the memory of a GPU (sglang.srt.arg_groups.memory_hook).
LARGE_GPU_BYTES: Final = 160_000_000_000
CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 8192, 16_384


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one rank, in bytes, and what fits in it.

    `kv_tokens` and `state_slots` hold for the whole machine, since each rank holds its part of every state
    and all of the KV. `host_tokens` and `host_states` are 0 without a host tier. `short_bytes` is what lacks
    of the memory that the weights take, 0 where they fit. Prefill leaves a state every `chunk_tokens`, and
    decoding one at each multiple of `track_tokens`.
    """

    hbm_bytes: int
    static_bytes: int
    weight_bytes: int
    short_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_rank: int
    state_bytes: int
    kv_tokens: int
    state_slots: int
    host_tokens: int
    host_states: int
    chunk_tokens: int = CHUNK_TOKENS
    track_tokens: int = TRACK_TOKENS
    most_running: int | None = None

    def __post_init__(self) -> None:
        assert min(self.kv_tokens, self.state_slots, self.host_tokens, self.host_states) >= 0, self
        assert self.chunk_tokens > 0 and self.track_tokens > 0, self

    @property
    def running_requests(self) -> int:
        """How many requests can run at once, by the slots of states that each takes."""
        fit = self.state_slots // SLOTS_PER_REQUEST
        return fit if self.most_running is None else min(fit, self.most_running)


def split(
    rest_bytes: int, ratio: float, kv_bytes: int, state_bytes: int, page_tokens: int
) -> tuple[int, int]:
    """KV tokens and state slots that `rest_bytes` of a rank hold.

    KVCacheConfigurator._handle_max_mamba_cache, without speculation.
    """
    slots = max(0, int((rest_bytes * ratio / (1 + ratio) - state_bytes) // state_bytes))
    left = rest_bytes - (slots + 1) * state_bytes
    return max(0, int(left) // kv_bytes // page_tokens * page_tokens), slots


def budget(
    machine: Machine,
    profile: Profile,
    geometry: Geometry,
    *,
    kv: KvType = "bf16",
    state: StateType = "fp32",
) -> Budget:
    """The budget of a machine under a launch profile, its host tier on."""
    values = {entry.flag: entry.value for entry in profile.argument}

    def number(flag: str, default: float) -> float:
        value = values.get(flag)
        return float(value) if isinstance(value, int | float) else default

    page_tokens = int(number("--page-size", 64))
    ratio = number("--mamba-full-memory-ratio", STATE_RATIO)
    static = int(machine.hbm_bytes * number("--mem-fraction-static", MEMORY_FRACTION))
    weights = geometry.weight_bytes // machine.ranks
    kv_bytes = geometry.kv_bytes(kv)
    rank_state = geometry.state_bytes(state, machine.ranks)
    rest = static - weights - RUNTIME_BYTES
    tokens, slots = split(rest, ratio, kv_bytes, rank_state, page_tokens) if rest > 0 else (0, 0)
    host = int(number("--hicache-size", 0) * 1e9)
    host_tokens, host_states = split(host, ratio, kv_bytes, rank_state, page_tokens) if host else (0, 0)
    chunk = LARGE_CHUNK_TOKENS if machine.hbm_bytes >= LARGE_GPU_BYTES else CHUNK_TOKENS
    return Budget(
        hbm_bytes=machine.hbm_bytes,
        static_bytes=static,
        weight_bytes=weights,
        short_bytes=max(0, -rest),
        kv_bytes_per_token=kv_bytes,
        state_bytes_per_rank=rank_state,
        state_bytes=geometry.state_bytes(state),
        kv_tokens=tokens,
        state_slots=slots,
        host_tokens=host_tokens,
        host_states=host_states,
        chunk_tokens=int(number("--chunked-prefill-size", chunk)),
        track_tokens=int(number("--mamba-track-interval", TRACK_TOKENS)),
    )
