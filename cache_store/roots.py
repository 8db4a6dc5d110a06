"""Whose chains are whose: what the gateway tells the store about a chain, under the hash of its first page.

SGLang tells its storage neither tenant nor time to live, only page hashes. But the first page's hash is a
function of the tenant's salt and the first tokens, both of which the gateway knows: before it asks the engine
it leaves a record under that hash, and the engine's process, which sees the same hash when it stores the
pages, reads it. Nothing here imports torch or SGLang.
"""

import asyncio
import hashlib
import json
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache_store.format import VERSION
from cache_store.retention import TTL_MS, Recent, TtlClass

RECORD_BYTES = 256
UNKNOWN = "-"
"""The tenant of chains that have no record."""

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Longer than any page: a record is there as long as there is a page whose life it decides.
_RECORD_TTL_MS = 2 * max(TTL_MS.values())
_ANNOUNCE_AGAIN_S = 60.0
_ANNOUNCED_MAX = 65_536
# A server that is down costs no more than one request in so many seconds its timeout.
_ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Root:
    """What is known of all chains that begin with one page.

    Attributes:
        tenant: whose bytes they are.
        ttl: their class; None for the store's own.
        max_bytes: what the tenant's values may take in one namespace; None for the store's own limit.
    """

    tenant: str = UNKNOWN
    ttl: TtlClass | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.tenant != UNKNOWN and not _TENANT.fullmatch(self.tenant):
            raise ValueError(
                f"tenant {self.tenant!r}: 1 to 64 of A-Z a-z 0-9 _ . -, not starting with a mark"
            )
        if self.ttl is not None and self.ttl not in TTL_MS:
            raise ValueError(f"ttl {self.ttl!r}: one of {', '.join(TTL_MS)}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes {self.max_bytes}: at least 1, or None for no limit of its own")

    def encode(self) -> bytes:
        """The record: JSON, filled up with blanks to `RECORD_BYTES`."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return text.ljust(RECORD_BYTES)

    @classmethod
    def decode(cls, record: bytes) -> "Root":
        """Read a record.

        Raises:
            ValueError: it is not one.
        """
        fields: Any = json.loads(record)
        match fields:
            case {"tenant": str(), "ttl": str() | None, "max_bytes": int() | None} if len(fields) == 3:
                return cls(**fields)
            case _:
                raise ValueError("a root's record has a tenant, a ttl and max_bytes, and nothing else")


def root_key(page: str) -> bytes:
    """The Redis key of the record of the chains whose first page is `page`."""
    return b"lh%d:root:%b" % (VERSION, page.encode())


def root_page(ids: Sequence[int], cache_salt: str | None, page_tokens: int) -> str | None:
    """SGLang's hash of the first page of a prompt, or None when the prompt is shorter than a page.

    SGLang 0.5.23: `storage_namespace_seed` and `get_hash_str` in `srt/mem_cache/utils.py`: SHA-256 over the
    seed and the tokens as little-endian 32-bit numbers. An empty salt is none.
    """
    if len(ids) < page_tokens:
        return None
    state = hashlib.sha256()
    if cache_salt:
        seed = hashlib.sha256(b"sglang-cache-namespace-v1")
        salt = cache_salt.encode()
        # No extra key, and a salt of so many bytes.
        seed.update(b"\x00\x01" + len(salt).to_bytes(8, "little") + salt)
        state.update(seed.digest())
    state.update(struct.pack(f"<{page_tokens}I", *ids[:page_tokens]))
    return state.hexdigest()


class RootRegistry:
    """Leaves records for the store's engines. A server that is down is no error: chains are then nobody's.

    One asyncio loop uses it.
    """

    def __init__(
        self,
        url: str,
        *,
        page_tokens: int = 64,
        timeout_s: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`url` as in the store's options: of several servers all are told, and engines ask the right one."""
        self._page_tokens = page_tokens
        self._clock = clock
        self._clients: list[Any] = [
            redis.asyncio.Redis.from_url(
                one.strip(),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
            for one in url.split(",")
        ]
        self._announced: Recent[str, tuple[Root, float]] = Recent(_ANNOUNCED_MAX)
        self._again_at = -_ASK_AGAIN_S

    async def announce(self, ids: Sequence[int], cache_salt: str | None, root: Root) -> bool:
        """Leave `root` for the chains that begin as the prompt `ids` does; False if the server failed.

        Asks the server at most once a minute for a root that says the same.
        """
        page = root_page(ids, cache_salt, self._page_tokens)
        if page is None:
            return True
        known, at = self._announced.get(page) or (None, 0.0)
        if known == root and self._clock() - at < _ANNOUNCE_AGAIN_S:
            return True
        if self._clock() < self._again_at:
            return False
        try:
            key, record = root_key(page), root.encode()
            await asyncio.gather(*(client.set(key, record, px=_RECORD_TTL_MS) for client in self._clients))
        except RedisError:
            self._again_at = self._clock() + _ASK_AGAIN_S
            return False
        self._announced.set(page, (root, self._clock()))
        return True

    async def aclose(self) -> None:
        """Leave the servers."""
        for client in self._clients:
            await client.aclose()
