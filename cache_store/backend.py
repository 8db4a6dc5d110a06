"""SGLang's HiCache storage over Redis: KV pages and KDA states that outlive the engine.

SGLang loads `RedisStore` with ``--hicache-storage-backend dynamic`` and calls it from threads of its own: one
looks spans of pages up, one reads, one writes, and the scheduler's registers, clears and closes. Nothing here
raises into them, and nothing takes longer than the deadline: what fails is a miss, and the engine computes.

Page hashes come from SGLang: each names all tokens up to the page's end, with the request's salt at the root
of the chain. Pages of MLA are the same on all ranks of tensor parallelism, so rank 0 writes them and the key
has no rank; a state is each rank's own.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sglang
import torch
from huggingface_hub import snapshot_download
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args

from cache_store import metrics, namespace
from cache_store.chain import Span, StoredPool
from cache_store.format import ValueId
from cache_store.keeper import Keeper
from cache_store.namespace import Parallelism
from cache_store.options import StoreOptions
from cache_store.pages import HostPages, Page, memory
from cache_store.shards import Shards
from cache_store.siblings import Siblings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# The draft only proposes: without its pages fewer proposals are accepted, and no token changes.
_DRAFT_POOLS = frozenset({PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA})

_ENGINE_ARGUMENTS = (
    "device",
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    # Not that of verification, which comes with a draft and fits in with the others.
)


class RedisStore(HiCacheStorage):
    """HiCache storage whose pages and states are values in Redis (`cache_store/README.md`)."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Open the store; a server that can't be reached is no error, settings that make no sense are.

        Raises:
            ValueError: the extra config or the engine's configuration can't be used, and why.
        """
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ValueError('the extra config lacks "interface_v1": 1, without which pages are copied twice')
        if storage_config.dcp_size > 1:
            raise ValueError("the store does not hold pages of decode context parallelism: use --dcp-size 1")
        self._options = StoreOptions.parse(extra)
        self._config = storage_config
        self._parallelism = Parallelism(
            tp_rank=storage_config.tp_rank,
            tp_size=storage_config.tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            cp_size=storage_config.attn_cp_size,
        )
        self._base: bytes | None = None
        self._hosts: dict[str, HostPages] = {}
        self._pools: dict[str, StoredPool] = {}
        self._bandwidth = _Bandwidth()
        self._values = Shards(self._options)
        self._siblings: Siblings | None = None
        self._keeper = Keeper(self._values, self._options)
        self._is_told_of_prefixes = True

    @property
    def faults(self) -> metrics.Faults:
        """Where faults are counted and logged."""
        return self._values.faults

    # Registration, on the scheduler's thread before any request. Errors here stop the engine's start.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of the target's KV."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take one more host pool, or one that came late.

        Raises:
            ValueError: its pages can't be stored.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        is_narrowed = name == PoolName.MAMBA and self._options.state_dtype == "bfloat16"
        self._hosts[name] = HostPages(name, host_pool, is_narrowed=is_narrowed)
        if self._base is not None:
            self._place(name, namespace.derived(self._base, self._hosts[name].geometry, _draft_weights(name)))

    def on_host_pools_registered(self) -> None:
        """Settle the namespace, now that the pools are known.

        Raises:
            ValueError: the checkpoint can't be read.
        """
        target = [pages.geometry for name, pages in self._hosts.items() if name not in _DRAFT_POOLS]
        self._base = namespace.namespace(
            weights=namespace.weights_fingerprint(
                self._options.model_path or _checkpoint(), is_dummy=_arguments().load_format == "dummy"
            ),
            engine=_engine_settings(),
            parallelism=self._parallelism,
            pools=target,
            salt=self._options.salt,
        )
        for name, pages in self._hosts.items():
            is_draft = name in _DRAFT_POOLS
            self._place(
                name,
                namespace.derived(self._base, pages.geometry, _draft_weights(name))
                if is_draft
                else self._base,
            )

    def _place(self, name: str, space: bytes) -> None:
        pages = self._hosts[name]
        # SGLang's verdict on the KV pool stands; the other pools speak for themselves.
        replicated = self._config.is_mla_model if name == PoolName.KV else not pages.is_sharded
        shard = self._parallelism.shard(replicated=replicated)
        self._pools[name] = pool = StoredPool(name, space, shard, pages.geometry.page_bytes)
        self._keeper.register(pool, page_tokens=pages.geometry.page_tokens if name == PoolName.KV else None)
        if name == PoolName.KV and replicated:
            self._siblings = self._open_siblings(pool)
        logger.info(
            "store %s: pool %s, %d bytes a page, %s, namespace %s, shard %r",
            self._values,
            name,
            pages.geometry.page_bytes,
            "direct" if pages.is_direct else "copied",
            space.hex(),
            shard,
        )

    def _open_siblings(self, pool: StoredPool) -> Siblings | None:
        """The ranks of this engine on this host, if they hold the same pages and may share memory."""
        config = self._config
        if config.tp_size == 1 or not self._options.share_bytes:
            return None
        name = "-".join(
            map(str, (pool.space.hex(), config.dp_rank, config.pp_rank, config.attn_cp_rank, config.dcp_rank))
        )
        try:
            return Siblings(
                self._values,
                name,
                config.tp_rank,
                pool.length,
                self._options.share_bytes,
                self._options.timeout_s,
            )
        except OSError as error:
            logger.warning("store: no shared memory, so each rank reads every page itself: %s", error)
            return None

    # Lookup, on the prefetch thread.

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of the span `keys` can be restored, for all pools in one round trip.

        A state exists at some page boundaries only, so the answer is a set: `restorable_prefix_pages`.
        """
        return self._guarded(lambda: self._restorable(keys, pool_transfers or ()), PoolTransferResult.empty())

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first `keys` the KV pool has, without a gap."""
        return self.batch_exists_v2(keys).kv_hit_pages

    def exists(self, key: str) -> bool:
        """Whether the KV pool has the page."""
        return self.batch_exists([key]) == 1

    # Reading, on the prefetch's I/O thread.

    def batch_get_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read KV pages into the host pool; for each key whether it is there now."""
        return self._guarded(
            lambda: self._read(str(PoolName.KV), self._span(keys, extra_info), host_indices),
            [False] * len(keys),
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of other pools; for each pool and key whether it is there now.

        A page of the draft that is missing is filled with zeros and counts as read.
        """
        return self._each(transfers, extra_info, self._read)

    # Writing, on the backup thread.

    def batch_set_v1(
        self,
        keys: Sequence[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write KV pages from the host pool; for each key whether it is stored, or will be."""
        return self._guarded(
            lambda: self._write(str(PoolName.KV), self._span(keys, extra_info), host_indices),
            [False] * len(keys),
        )

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of other pools; for each pool and key whether it is stored, or will be."""
        return self._each(transfers, extra_info, self._write)

    # Single pages as tensors: the interface's older half, of the KV pool.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one page into a flat tensor of its size; None if it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors of their size; None for each that is not there."""
        tensors: list[torch.Tensor] = list(target_locations or ())
        done = self._guarded(
            lambda: self._fetch(str(PoolName.KV), Span(keys), [Page([memory(tensor)]) for tensor in tensors]),
            [False] * len(tensors),
        )
        return [tensor if ok else None for tensor, ok in zip(tensors, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write one page from a flat tensor; whether it is stored, or will be."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write pages from flat tensors; whether all are stored, or will be."""
        tensors: list[torch.Tensor] = list(values or ())
        return self._guarded(
            lambda: all(
                self._put(str(PoolName.KV), Span(keys), [Page([memory(tensor)]) for tensor in tensors])
            ),
            False,
        )

    # Administration, on the scheduler's thread.

    def clear(self) -> None:
        """Remove all that this engine's namespaces hold, for every engine that shares them."""
        for space in {pool.space for pool in self._pools.values()}:
            self._values.clear(namespace.key_prefix(space))

    def get_stats(self) -> Any:
        """Pages and GB/s of the KV reads and writes since the last call, for SGLang's own histograms."""
        return self._bandwidth.take()

    def close(self) -> None:
        """Write what waits for a retry and leave the server."""
        self._keeper.close()
        if self._siblings is not None:
            self._siblings.close()
            self._siblings = None
        self._values.close()

    def _guarded(self, work: Callable[[], _T], otherwise: _T) -> _T:
        """What `work` returns, or `otherwise` if it raises: an error of our own is a miss as well."""
        try:
            return work()
        except Exception as error:
            self.faults.count("internal", error, trace=True)
            return otherwise

    def _each(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        work: Callable[[str, Span, Any], list[bool]],
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            span = self._span(keys, extra_info)
            results[transfer.name] = self._guarded(
                lambda transfer=transfer, span=span: work(str(transfer.name), span, transfer.host_indices),
                [False] * len(keys),
            )
        return results

    def _span(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> Span:
        prefix = extra_info.prefix_keys if extra_info is not None else None
        if prefix is None and self._is_told_of_prefixes:
            self._is_told_of_prefixes = False
            logger.warning(
                "store: SGLang does not say which pages come before others: no state is superseded, nothing "
                'is counted by tenant; set "hicache_storage_pass_prefix_keys": true in the extra config'
            )
        return Span(keys, prefix)

    def _restorable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        names = [str(PoolName.KV), *(str(transfer.name) for transfer in transfers)]
        pools = [self._pools[name] for name in names]
        found = self._values.find(
            [key for pool in pools for key in pool.keys(keys)],
            [length for pool in pools for length in [pool.record_bytes] * len(keys)],
        )
        there = [found[at * len(keys) : (at + 1) * len(keys)] for at in range(len(names))]
        pages = _leading(there[0])
        hits = {str(PoolName.KV): pages}
        restorable = set(range(1, pages + 1))
        for transfer, has in zip(transfers, there[1:], strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                possible = set(range(1, _leading(has[:pages]) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                possible = {end for end in range(1, pages + 1) if all(has[max(0, end - window) : end])}
            else:
                raise ValueError(f"hit policy {transfer.hit_policy} of pool {transfer.name} is not supported")
            hits[str(transfer.name)] = max(possible, default=0)
            if transfer.name not in _DRAFT_POOLS:
                restorable &= possible
        longest = max(restorable, default=0)
        metrics.LOOKUPS.inc()
        for name in names:
            metrics.LOOKUP_PAGES.labels(name, "hit").inc(hits[name])
            metrics.LOOKUP_PAGES.labels(name, "missed").inc(len(keys) - hits[name])
        return PoolTransferResult(
            longest, {name: count for name, count in hits.items() if count}, sorted(restorable)
        )

    def _read(self, name: str, span: Span, host_indices: Any) -> list[bool]:
        pages = self._hosts[name].to_fill(host_indices)
        done = self._fetch(name, span, pages)
        for page, ok in zip(pages, done, strict=True):
            if ok:
                page.commit()
            elif name in _DRAFT_POOLS:
                page.clear()
        return [True] * len(span.keys) if name in _DRAFT_POOLS else done

    def _write(self, name: str, span: Span, host_indices: Any) -> list[bool]:
        if not self._keeper.admits(self._pools[name], span):
            return [False] * len(span.keys)
        return self._put(name, span, self._hosts[name].to_read(host_indices))

    def _fetch(self, name: str, span: Span, pages: Sequence[Page]) -> list[bool]:
        started = time.perf_counter()
        values = self._values_of(name, span, pages)
        # Where the pages lie is known: they are prolonged later, when nobody waits.
        lives = 0 if span.prefix is not None else self._keeper.lives_ms(span)
        reader = self._siblings if name == PoolName.KV and self._siblings is not None else self._values
        done = reader.fetch(values, [page.segments for page in pages], name, lives)
        if name == PoolName.KV and self._config.enable_storage_metrics:
            self._bandwidth.add("prefetch", values, done, time.perf_counter() - started)
        note = self._keeper.read_state if name == PoolName.MAMBA else self._keeper.read
        note(self._pools[name], span, done)
        return done

    def _put(self, name: str, span: Span, pages: Sequence[Page]) -> list[bool]:
        started = time.perf_counter()
        values = self._values_of(name, span, pages)
        lives = self._keeper.lives_ms(span)
        done = self._values.put(values, [page.segments for page in pages], name, lives)
        if name == PoolName.KV and self._config.enable_storage_metrics:
            self._bandwidth.add("backup", values, done, time.perf_counter() - started)
        if name != PoolName.MAMBA:
            self._keeper.written(self._pools[name], span, done)
        elif all(done):
            self._keeper.arrived(self._pools[name], span)
        return done

    def _values_of(self, name: str, span: Span, pages: Sequence[Page]) -> list[ValueId]:
        pool = self._pools[name]
        if len(pages) != len(span.keys) or any(page.nbytes != pool.length for page in pages):
            raise ValueError(
                f"pool {name}: {len(span.keys)} keys, but not as many pages of {pool.length} bytes"
            )
        return pool.values(span.keys)


class _Bandwidth:
    """What SGLang's own metrics want to know, collected until they ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StorageMetrics()

    def add(self, kind: str, values: Sequence[ValueId], done: Sequence[bool], seconds: float) -> None:
        moved = sum(value.length for value, ok in zip(values, done, strict=True) if ok)
        with self._lock:
            getattr(self._stats, f"{kind}_pgs").append(sum(done))
            getattr(self._stats, f"{kind}_bandwidth").append(moved / 1e9 / seconds)

    def take(self) -> StorageMetrics:
        with self._lock:
            stats, self._stats = self._stats, StorageMetrics()
        return stats


def _leading(there: Sequence[bool]) -> int:
    """How many are there before the first that is not."""
    return next((at for at, ok in enumerate(there) if not ok), len(there))


def _arguments() -> Any:
    """The engine's arguments, resolved."""
    return resolved_view(get_server_args())


def _checkpoint() -> Path:
    """The directory of the engine's checkpoint."""
    arguments = _arguments()
    return _local(arguments.model_path, arguments.revision)


def _draft_weights(pool: str) -> str:
    """Fingerprint of the weights that fill a draft's pool; "" for the target's own."""
    arguments = _arguments()
    path = arguments.speculative_draft_model_path if pool in _DRAFT_POOLS else None
    if not path:
        return ""
    load_format = arguments.speculative_draft_load_format or arguments.load_format
    return namespace.weights_fingerprint(
        _local(path, arguments.speculative_draft_model_revision), is_dummy=load_format == "dummy"
    )


def _local(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    # A name on the hub, which the engine has downloaded before it made its pools.
    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _engine_settings() -> dict[str, Any]:
    """What, besides weights and shapes, decides which numbers this engine computes and how they lie.

    The shape of a state does not tell which of its axes comes first: that is the operators' own choice, so
    the device, the kernels and SGLang's version count.
    """
    arguments = _arguments()
    settings = {name: getattr(arguments, name) for name in _ENGINE_ARGUMENTS}
    if arguments.load_format == "dummy":
        settings["dummy_weights_seed"] = arguments.random_seed
    return {"sglang": sglang.__version__, **settings}
