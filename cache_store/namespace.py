"""Which engines may read each other's bytes: the digest of all that decides it, and the keys under it.

Bytes in the store carry no description of themselves. Two engines share a key only when everything that
gives the bytes their meaning is the same: the weights, the architecture, the data types, the shapes, the
page size, the memory layout and the parallel geometry. All of it goes into one digest, which stands in
every key and every header. What differs in any of it is a miss.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache_store.format import DIGEST_BYTES, VERSION

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_SAFETENSORS_HEADER_MAX_BYTES = 100 * 1024 * 1024  # the format's own limit
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Says who wrote the file, not what is computed from it.
_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version"})


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The shape of one host pool's pages, read off the pool itself.

    Attributes:
        name: SGLang's name of the pool ("kv", "mamba", "draft").
        kind: class of the host pool.
        layout: SGLang's host memory layout ("page_first", "page_first_direct", ...).
        page_tokens: tokens per page; 1 for states.
        layers: (first, one past the last, number of) layers that a page holds.
        arrays: (name, dtype, shape) of what a page is made of.
        component_bytes: sizes of the regions of one page as stored, in their order.
        stored_dtype: "exact", or what float32 numbers become on their way into the store.
    """

    name: str
    kind: str
    layout: str
    page_tokens: int
    layers: tuple[int, int, int]
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    component_bytes: tuple[int, ...]
    stored_dtype: str = "exact"

    def __post_init__(self) -> None:
        assert self.name and self.kind and self.layout, self
        assert self.page_tokens > 0 and self.component_bytes and min(self.component_bytes) > 0, self

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all components together."""
        return sum(self.component_bytes)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How the model is spread, and which part this process holds.

    `tp` counts within an attention group, so replicas of data parallel attention share their keys.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            assert 0 <= rank < size, f"{axis} rank {rank} of {size}"

    def geometry(self) -> dict[str, int]:
        """The sizes alone: the same on all ranks."""
        return {"tp": self.tp_size, "pp": self.pp_size, "cp": self.cp_size}

    def shard(self, *, replicated: bool) -> str:
        """The part of a key that says whose part of a page this is; "" where all ranks hold the same.

        `replicated` pools (MLA) are equal on all TP ranks; the stages of a pipeline hold different layers,
        and the ranks of context parallelism different tokens, of every pool.
        """
        axes = [] if replicated else [f"t{self.tp_rank}.{self.tp_size}"]
        if self.pp_size > 1:
            axes.append(f"p{self.pp_rank}.{self.pp_size}")
        if self.cp_size > 1:
            axes.append(f"c{self.cp_rank}.{self.cp_size}")
        return ".".join(axes)


def digest(description: Mapping[str, Any]) -> bytes:
    """The 16-byte digest of a JSON-able description, independent of the order of its keys."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"longhaul-store").digest()


def namespace(
    *,
    weights: str,
    engine: Mapping[str, Any],
    parallelism: Parallelism,
    pools: Iterable[PoolGeometry],
    salt: str = "",
) -> bytes:
    """The namespace of the target model's pools, 16 bytes.

    Args:
        weights: `weights_fingerprint` of the checkpoint.
        engine: settings of the engine that change what it computes (dtype, quantization, overrides).
        parallelism: of the engine; its ranks do not enter.
        pools: the target's own pools. A pool of the draft has its own namespace below this one
            (`derived`), so that changing the draft keeps the target's pages.
        salt: an operator's own text, to part what is equal in all else.
    """
    return digest(
        {
            "format": VERSION,
            "byteorder": sys.byteorder,
            "weights": weights,
            "engine": dict(engine),
            "parallelism": parallelism.geometry(),
            "pools": sorted((asdict(pool) for pool in pools), key=lambda pool: pool["name"]),
            "salt": salt,
        }
    )


def derived(base: bytes, pool: PoolGeometry, weights: str = "") -> bytes:
    """The namespace of one more pool beside the target's own, with the weights that fill it, 16 bytes."""
    return digest({"base": base.hex(), "pool": asdict(pool), "weights": weights})


def key_prefix(space: bytes) -> bytes:
    """What all keys of a namespace begin with. Half the digest: the header has the whole of it."""
    return b"lh%d:%b:" % (VERSION, space[:8].hex().encode())


def page_keys(space: bytes, pool: str, pages: Sequence[str], shard: str = "") -> list[bytes]:
    """The Redis keys of pages (or states) of `pool`, which SGLang calls by the hashes `pages`."""
    assert not any(":" in name for name in (pool, *pages)), "a colon in a name would blur two keys"
    head = key_prefix(space) + f"{pool}:".encode()
    tail = f":{shard}".encode() if shard else b""
    return [head + page.encode() + tail for page in pages]


def weights_fingerprint(directory: Path, *, is_dummy: bool = False) -> str:
    """A digest of the checkpoint in `directory` that is cheap for any size and equal on every machine.

    It covers the configuration, and of every weight file the name, the size, the safetensors header (all
    names, types, shapes and offsets) and 64 evenly spaced samples of 4 KiB, the file's ends included. A
    change that touches none of the samples goes unseen: give such a checkpoint its own salt. Dummy weights
    (`is_dummy`) are made from the configuration and a seed, and no file is read.

    Raises:
        ValueError: the directory has no config.json or no weight file, or a header is not readable.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{directory} has no config.json: model_path must name a checkpoint's directory")
    found = [] if is_dummy else directory.iterdir()
    files = sorted(path for path in found if path.suffix in _WEIGHT_SUFFIXES)
    if not files and not is_dummy:
        raise ValueError(f"{directory} has no weight file ({', '.join(_WEIGHT_SUFFIXES)})")
    config = json.loads(config_path.read_text())
    kept = {name: value for name, value in config.items() if name not in _CONFIG_NOISE}
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"longhaul-weights")
    state.update(digest(kept))
    for path in files:
        for part in _parts(path):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _parts(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    yield path.name.encode()
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size, _SAFETENSORS_HEADER_MAX_BYTES):
                raise ValueError(f"{path} is not a safetensors file: its header has {header_bytes} bytes")
            yield hashlib.blake2b(file.read(header_bytes)).digest()
        last = max(0, size - _SAMPLE_BYTES)
        for offset in sorted({last * step // (_SAMPLES_PER_FILE - 1) for step in range(_SAMPLES_PER_FILE)}):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)
