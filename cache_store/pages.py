"""The pages of a host pool as memory: what of it one page is, in which order it is stored.

A host pool says where a page lies (`get_page_buffer_meta`): bytes then move between it and the socket without
a copy. A pool that can't (some layouts, states with side data) gives and takes a page as a copy.

Pools are taken as they are, by the names of their attributes; neither torch nor SGLang is imported.
"""

import bisect
import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cache_store.namespace import PoolGeometry
from cache_store.narrowing import narrow, widen

_KNOWN_SHAPES = ("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_num", "head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class Page:
    """Memory of one page, as views whose concatenation is the payload.

    After a page has been received into `segments`, `commit` puts it where the engine looks for it.
    """

    segments: list[memoryview]
    commit: Callable[[], None] = field(default=lambda: None)

    @property
    def nbytes(self) -> int:
        """Length of the payload, in bytes."""
        return sum(map(len, self.segments))

    def clear(self) -> None:
        """Fill the page with zeros."""
        for segment in self.segments:
            segment[:] = bytes(len(segment))
        self.commit()


class HostPages:
    """The pages of one host pool.

    Attributes:
        geometry: shape of the pages, as they are stored.
        is_direct: whether a page is the pool's own memory rather than a copy.
    """

    def __init__(self, name: str, pool: Any, *, is_narrowed: bool = False) -> None:
        """Look at `pool`, which SGLang calls `name`.

        With `is_narrowed` its float32 numbers are stored as bfloat16.

        Raises:
            ValueError: the pool has no memory of its own, gives no page, or has nothing to narrow.
        """
        self._pool = pool
        self._page_tokens = int(getattr(pool, "page_size", 1) or 1)
        if getattr(pool, "kv_buffer", None) is None:
            raise ValueError(f"host pool {name} has no memory: the store needs materialized host pools")
        self._regions = sorted((_Region(tensor) for tensor in _tensors(pool)), key=lambda it: it.address)
        self._addresses = [region.address for region in self._regions]
        first = np.arange(self._page_tokens)
        try:
            pointers, sizes = pool.get_page_buffer_meta(first)
            self.is_direct = True
            components = tuple(int(size) for size in sizes)
            assert len(pointers) == len(components), "as many pointers as sizes"
        except (NotImplementedError, ValueError):
            self.is_direct = False
            components = (len(memory(pool.get_dummy_flat_data_page())),)
        self._components = components
        self.geometry = _geometry(name, pool, self._page_tokens, components)
        self._narrowed = _float32_components(name, self.geometry) if is_narrowed and self.is_direct else ()
        if is_narrowed:
            if not any(self._narrowed):
                raise ValueError(
                    f'pool {name} has no float32 states in one piece: set state_dtype to "exact"'
                )
            self.is_direct = False
            halves = zip(components, self._narrowed, strict=True)
            self.geometry = replace(
                self.geometry,
                component_bytes=tuple(size // 2 if narrowed else size for size, narrowed in halves),
                stored_dtype="bfloat16",
            )

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of tensor parallelism hold different parts: all but the latent pages of MLA do."""
        return not hasattr(self._pool, "kv_lora_rank")

    def to_read(self, host_indices: Any) -> list[Page]:
        """The pages at `host_indices` (a row of `page_tokens` slots for each), to be written to the store.

        Raises:
            ValueError: the indices are not whole pages of this pool.
        """
        if self.is_direct:
            return self._direct(host_indices)
        if self._narrowed:
            return [self._narrow(page) for page in self._direct(host_indices)]
        return [
            Page([memory(self._pool.get_data_page(start, flat=True).contiguous())])
            for start in self._starts(host_indices)
        ]

    def to_fill(self, host_indices: Any) -> list[Page]:
        """The pages at `host_indices`, to be filled from the store; commit each that was filled.

        Raises:
            ValueError: the indices are not whole pages of this pool.
        """
        if self.is_direct:
            return self._direct(host_indices)
        if self._narrowed:
            return [self._to_widen(page) for page in self._direct(host_indices)]
        return [self._scratch(start) for start in self._starts(host_indices)]

    def _starts(self, host_indices: Any) -> list[int]:
        if len(host_indices) % self._page_tokens:
            raise ValueError(f"{len(host_indices)} indices are not pages of {self._page_tokens}")
        return [int(index) for index in host_indices[:: self._page_tokens].tolist()]

    def _direct(self, host_indices: Any) -> list[Page]:
        starts = self._starts(host_indices)
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        per_page = len(self._components)
        if len(pointers) != len(starts) * per_page or tuple(sizes) != self._components * len(starts):
            raise ValueError(f"host pool {self.geometry.name} gives pages of another shape than at the start")
        views = [self._view(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        return [Page(views[at : at + per_page]) for at in range(0, len(views), per_page)]

    def _narrow(self, page: Page) -> Page:
        segments = [memoryview(bytearray(size)) for size in self.geometry.component_bytes]
        for source, target, narrowed in zip(page.segments, segments, self._narrowed, strict=True):
            if narrowed:
                narrow(source, target)
            else:
                target[:] = source
        return Page(segments)

    def _to_widen(self, page: Page) -> Page:
        segments = [memoryview(bytearray(size)) for size in self.geometry.component_bytes]

        def commit() -> None:
            for source, target, narrowed in zip(segments, page.segments, self._narrowed, strict=True):
                if narrowed:
                    widen(source, target)
                else:
                    target[:] = source

        return Page(segments, commit)

    def _view(self, pointer: int, size: int) -> memoryview:
        region = self._regions[bisect.bisect_right(self._addresses, pointer) - 1]
        start = pointer - region.address
        if not 0 <= start <= region.nbytes - size:
            raise ValueError(f"host pool {self.geometry.name}: a page lies outside of the pool's memory")
        return region.view[start : start + size]

    def _scratch(self, start: int) -> Page:
        flat = self._pool.get_dummy_flat_data_page()
        return Page([memory(flat)], lambda: self._pool.set_from_flat_data_page(start, flat))


class _Region:
    """The memory of one tensor, kept alive by it."""

    def __init__(self, tensor: Any) -> None:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError("a host pool's memory must be contiguous and on the host")
        self.address = int(tensor.data_ptr())
        self.nbytes = int(tensor.numel() * tensor.element_size())
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        # The view keeps the array alive, and the array, which itself owns nothing, the tensor.
        array.owner = tensor  # pyright: ignore[reportAttributeAccessIssue]
        self.view = memoryview(array).cast("B")


def memory(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor on the host, which the view keeps alive."""
    return _Region(tensor).view


def _tensors(pool: Any) -> Iterable[Any]:
    own = getattr(pool, "get_hybrid_pool_buffer", None)
    buffers = own() if own is not None else pool.kv_buffer
    tensors = buffers if isinstance(buffers, list | tuple) else [buffers]
    return [tensor for tensor in tensors if tensor.numel() > 0]


def _float32_components(name: str, geometry: PoolGeometry) -> tuple[bool, ...]:
    """Which of a state's components are float32; none unless each is one array."""
    if len(geometry.arrays) != len(geometry.component_bytes):
        raise ValueError(
            f"pool {name} keeps {len(geometry.arrays)} arrays in {len(geometry.component_bytes)} pieces"
        )
    return tuple(dtype == "torch.float32" for _, dtype, _ in geometry.arrays)


def _geometry(name: str, pool: Any, page_tokens: int, components: tuple[int, ...]) -> PoolGeometry:
    arrays: list[tuple[str, str, tuple[int, ...]]] = []
    if hasattr(pool, "temporal_state_shape"):
        arrays.append(("temporal", str(pool.temporal_dtype), _shape(pool.temporal_state_shape)))
        arrays += [
            (f"conv{index}", str(pool.conv_dtype), _shape(shape))
            for index, shape in enumerate(pool.conv_state_shapes)
        ]
    else:
        sizes = [(item, int(getattr(pool, item))) for item in _KNOWN_SHAPES if hasattr(pool, item)]
        arrays += [(item, str(pool.dtype), (size,)) for item, size in sizes]
    layers = int(getattr(pool, "num_mamba_layers", None) or getattr(pool, "layer_num", 0))
    return PoolGeometry(
        name=name,
        kind=":".join(filter(None, (type(pool).__name__, getattr(pool, "storage_format_tag", None)))),
        layout=str(pool.layout),
        page_tokens=page_tokens,
        layers=(int(getattr(pool, "start_layer", 0)), int(getattr(pool, "end_layer", layers)), layers),
        arrays=tuple(arrays),
        component_bytes=components,
    )


def _shape(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)
