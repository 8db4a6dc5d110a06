"""Hooks around SGLang code that takes a GPU for granted, and the values that stand in for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Original = Callable[..., Any]


def without_cuda_streams(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Build K3 with None for the side stream that it creates unasked outside HIP."""

    def no_stream(*_: Any, **__: Any) -> None:
        return None

    stream = torch.cuda.Stream
    torch.cuda.Stream = no_stream  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return original(self, *args, **kwargs)
    finally:
        torch.cuda.Stream = stream  # pyright: ignore[reportAttributeAccessIssue]


class _OtherDevice:
    """A view of resolved arguments that names a device which DSPARK accepts."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return "xpu" if name == "device" else getattr(self._view, name)


def dspark_device(original: Original, server_args: Any) -> Any:
    """Resolve DSPARK's arguments past its list of device names, which knows no out-of-tree platform."""
    from sglang.srt.arg_groups import speculative_hook

    view = speculative_hook.resolving_view

    def other_view(args: Any) -> Any:
        return _OtherDevice(view(args))

    speculative_hook.resolving_view = other_view
    try:
        return original(server_args)
    finally:
        speculative_hook.resolving_view = view


def plain_rope(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build the draft's attention without its table-driven norm and rope kernel."""
    original(self, *args, **kwargs)
    self.use_table_qk_norm_rope = False


def unpinned(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Build a host pool in pageable memory, and say so to whoever asks it later."""
    original(self, *args, **kwargs)
    self.pin_memory = False


def no_registration(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Leave host memory unregistered: there is no device to register it with."""


def no_copy_kernel(self: Any) -> None:
    """Skip the warm-up of a copy kernel that is never called."""


def no_fused_write(self: Any, pool: Any) -> None:
    """Tell the draft that its fused KV write doesn't apply."""


def keep_pageable(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for ``Tensor.pin_memory``: the tensor itself."""
    return self


def no_stream_record(self: Tensor, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``Tensor.record_stream``: nothing runs beside the caller."""
