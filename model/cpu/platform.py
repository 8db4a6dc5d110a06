"""The SGLang platform ``longhaul_cpu``: a plain CPU, served by torch operators.

SGLang's own CPU engine needs ``sgl_kernel`` operators that no published wheel contains, so this is an
out-of-tree platform: selected by ``SGLANG_PLATFORM=longhaul_cpu`` and inactive otherwise, also where
the package is installed beside a GPU.
"""

import os
from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import DeviceCapability, PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch import Tensor

from model.cpu import slots
from model.cpu.names import BACKEND_NAME, PLATFORM_NAME

# What the engine may plan with unless LONGHAUL_CPU_MEMORY_GIB says otherwise: launch profiles size the pools
# explicitly, and SGLang's default share of the whole machine would starve its neighbours.
DEFAULT_MEMORY_GIB = 8.0
GIB = 1 << 30

# Switches whose operators exist as CUDA kernels only. Refused at the start: met in a request, they would end
# the scheduler and the server with it.
_REFUSED = {
    "enable_linear_replayssm": "--enable-linear-replayssm",
    "enable_linear_replayssm_spec": "--enable-linear-replayssm-spec",
    "speculative_use_block_verification": "--speculative-use-block-verification",
}


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: the class to use, or None when not asked for."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "model.cpu.platform:CpuPlatform"


class CpuPlatform(SRTPlatform):
    """One CPU as SGLang's device: no kernels of its own, no graphs, gloo between ranks."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Serve text alone: K3's media processor isn't part of the tiny checkpoint.

        Raises:
            ValueError: an argument asks for what only a GPU has.
        """
        for field, flag in _REFUSED.items():
            if getattr(server_args, field):
                raise ValueError(f"{flag} isn't served by the CPU platform: leave it out")
        server_args.enable_multimodal = False

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes that the engine may plan with: ``LONGHAUL_CPU_MEMORY_GIB``, at most what the machine has."""
        text = os.environ.get("LONGHAUL_CPU_MEMORY_GIB", str(DEFAULT_MEMORY_GIB))
        try:
            planned = float(text) * GIB
        except ValueError:
            raise ValueError(f"LONGHAUL_CPU_MEMORY_GIB is {text!r}: give a number of GiB") from None
        return int(min(planned, psutil.virtual_memory().total))

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Resident bytes of this process."""
        return float(psutil.Process().memory_info().rss)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Free and total bytes."""
        total = self.get_device_total_memory(device_id)
        return max(0, int(total - self.get_current_memory_usage())), total

    def get_device(self, device_id: int = 0) -> str:
        """Name of the only device."""
        return "cpu"

    def set_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    def get_device_name(self, device_id: int = 0) -> str:
        """Name of the only device."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """A constant: there is one device."""
        return "cpu-0"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """A CPU has no compute capability."""
        return None

    def get_default_attention_backend(self) -> str:
        """Our own backend."""
        return BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Our own backend serves the draft too."""
        return BACKEND_NAME

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """DSpark alone has its operators here."""
        return algorithm in ("DSPARK", "DFLASH")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Our own backend only."""
        return backend == BACKEND_NAME

    def get_speculative_cache_locs_fn(self) -> Callable[..., Tensor]:
        """Where a verified block is written; SGLang's own reader is a kernel that no wheel has."""

        def locate(
            *,
            req_pool_indices: Tensor,
            req_to_token: Tensor,
            start_offset: Tensor,
            end_offset: Tensor,
            batch_size: int,
            **_: object,
        ) -> Tensor:
            n = batch_size
            return slots.read_slots(req_to_token, req_pool_indices[:n], start_offset[:n], end_offset[:n])

        return locate

    def support_mamba_cache_extra_buffer(self) -> bool:
        """State snapshots at tracked chunk borders are implemented."""
        return True

    def get_compile_backend(self, mode: str | None = None) -> str:
        """No compilation."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Fused operators run their torch form, ``forward_native``."""
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        """Ranks talk through gloo."""
        return "gloo"
