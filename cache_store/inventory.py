"""What lies in a store: every value with its size, life and tenant, found by walking the servers' keys.

For operators: it reads no payload, but asks for every key. The format of keys is in `cache_store/README.md`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store.accounting import HELD, IndexKey
from cache_store.format import VERSION
from cache_store.roots import UNKNOWN

_TIMEOUT_S = 60.0
_BATCH = 1000
_ALL = b"lh%d:*" % VERSION
_CHUNK = re.compile(rb"(.+):[0-9a-f]{32}:\d+")
# Where the keys of values have the name of a pool.
_NO_POOLS = frozenset({HELD, "next"})

Progress = Callable[[int, int], None]
"""Takes how many keys were seen, and how many there are about."""

_Owners = Mapping[tuple[str, str, str], str]
"""The tenant of each value, by namespace, pool and page."""


@dataclass(frozen=True, slots=True)
class Held:
    """A record: a value, or a chunk of one.

    Attributes:
        key: of the record itself.
        namespace: the half of it that stands in keys, in hex.
        pool: SGLang's name of the pool.
        page: SGLang's hash, with the shard behind a colon where there is one.
        tenant: whose it is; "-" where nobody has said.
        nbytes: of the record, header included.
        life_ms: until it expires; -1 for never.
        is_chunk: whether it is a part of a value.
    """

    key: bytes
    namespace: str
    pool: str
    page: str
    tenant: str
    nbytes: int
    life_ms: int
    is_chunk: bool


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server says of itself. `max_bytes` 0: no limit."""

    name: str
    keys: int
    used_bytes: int
    max_bytes: int
    evicted: int
    expired: int


class Inventory:
    """A walk over the servers of a store. Its methods raise `redis.RedisError`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` as in the store's options, one for each server."""
        self._servers: list[Any] = [
            redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)) for url in urls
        ]

    def servers(self) -> list[ServerState]:
        """Each server's own numbers."""
        return [_state(server) for server in self._servers]

    def records(self, progress: Progress | None = None) -> Iterator[Held]:
        """All values and their chunks. What changes meanwhile may be missed or come twice."""
        owners = self._owners()
        for server, keys in self._batches(progress):
            yield from _described(server, keys, owners)

    def remove(self, tenant: str | None, progress: Progress | None = None) -> tuple[int, int]:
        """Remove what a tenant holds, or, for None, all; returns how many values and bytes that were.

        What an engine writes meanwhile stays.
        """
        owners = self._owners()
        values = nbytes = 0
        for server, keys in self._batches(progress):
            found = [held for held in _described(server, keys, owners) if tenant in (None, held.tenant)]
            gone = keys if tenant is None else [held.key for held in found]
            if gone:
                server.unlink(*gone)
            values += sum(not held.is_chunk for held in found)
            nbytes += sum(held.nbytes for held in found)
        # Last: without them, what is left when this is cut short would be nobody's.
        for server, key, index in self._indexes():
            if tenant in (None, index.tenant):
                server.unlink(key)
        return values, nbytes

    def close(self) -> None:
        """Leave the servers."""
        for server in self._servers:
            server.close()

    def _batches(self, progress: Progress | None) -> Iterator[tuple[Any, list[bytes]]]:
        total = sum(int(server.dbsize()) for server in self._servers)
        seen = 0
        for server in self._servers:
            batch: list[bytes] = []
            for key in server.scan_iter(match=_ALL, count=_BATCH):
                batch.append(key)
                if len(batch) == _BATCH:
                    yield server, batch
                    seen += len(batch)
                    batch = []
                    if progress is not None:
                        progress(seen, max(total, seen))
            if batch:
                yield server, batch
                seen += len(batch)
        if progress is not None:
            progress(max(total, seen), max(total, seen))

    def _indexes(self) -> Iterator[tuple[Any, bytes, IndexKey]]:
        for server in self._servers:
            for key in server.scan_iter(match=b"lh%d:*:%b:*" % (VERSION, HELD.encode()), count=_BATCH):
                index = IndexKey.decode(key)
                if index is not None:
                    yield server, key, index

    def _owners(self) -> _Owners:
        owners: dict[tuple[str, str, str], str] = {}
        for server, key, index in self._indexes():
            space = key.split(b":")[1].decode()
            for member, _ in server.zscan_iter(key, count=_BATCH):
                owners[(space, index.pool, member.decode())] = index.tenant
        return owners


def _described(server: Any, keys: Sequence[bytes], owners: _Owners) -> list[Held]:
    named = [(key, *parts) for key in keys if (parts := _parse(key)) is not None]
    with server.pipeline(transaction=False) as pipeline:
        for key, *_ in named:
            pipeline.strlen(key)
            pipeline.pttl(key)
        replies = cast(list[Any], pipeline.execute(raise_on_error=False))
    found: list[Held] = []
    for (key, space, pool, page, is_chunk), nbytes, life_ms in zip(
        named, replies[::2], replies[1::2], strict=True
    ):
        # Gone since it was listed, or of another type and so none of ours.
        if isinstance(nbytes, int) and nbytes > 0:
            tenant = owners.get((space, pool, page), UNKNOWN)
            found.append(Held(key, space, pool, page, tenant, nbytes, int(life_ms), is_chunk))
    return found


def _parse(key: bytes) -> tuple[str, str, str, bool] | None:
    """Namespace, pool and page of a value's or chunk's key, and which of both; None for another key."""
    chunk = _CHUNK.fullmatch(key)
    parts = (chunk[1] if chunk else key).decode(errors="replace").split(":", 3)
    if len(parts) != 4 or parts[2] in _NO_POOLS:
        return None
    return parts[1], parts[2], parts[3], chunk is not None


def _state(server: Any) -> ServerState:
    info = cast(dict[str, Any], server.info())
    arguments = cast(dict[str, Any], server.connection_pool.connection_kwargs)
    name = arguments.get("path") or f"{arguments.get('host')}:{arguments.get('port')}"
    return ServerState(
        name=str(name),
        keys=int(server.dbsize()),
        used_bytes=int(info["used_memory"]),
        max_bytes=int(info.get("maxmemory", 0)),
        evicted=int(info["evicted_keys"]),
        expired=int(info["expired_keys"]),
    )
