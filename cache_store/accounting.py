"""What each tenant has in the store: an index beside the values, kept by those who write them.

For each namespace, pool and tenant a sorted set: members are values (`PAGE` or `PAGE:SHARD`), scores the
dates at which they expire, in ms since 1970. All values of a pool have one length, so a count is a sum of
bytes, and members whose date has passed count no more. Adding twice adds once; nothing is ever subtracted, so
no crash and no lost reply can make the sum wrong for longer than a time to live. What a full server evicts
counts until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cache_store import namespace
from cache_store.chain import StoredPool
from cache_store.retention import TTL_MS
from cache_store.shards import Shards

HELD = "held"
"""Where the keys of values have the name of a pool. No pool of SGLang's has this one."""

_INDEX_TTL_MS = b"%d" % (2 * max(TTL_MS.values()))


@dataclass(frozen=True, slots=True)
class IndexKey:
    """The key of one index: ``lh1:NAMESPACE:held:POOL.LENGTH:TENANT``."""

    pool: str
    length: int
    tenant: str

    def encode(self, space: bytes) -> bytes:
        """The Redis key in the namespace `space`."""
        return namespace.key_prefix(space) + f"{HELD}:{self.pool}.{self.length}:{self.tenant}".encode()

    @classmethod
    def decode(cls, key: bytes) -> "IndexKey | None":
        """Read a key; None if it is no index's."""
        match key.decode(errors="replace").split(":"):
            case [_, _, word, values, tenant] if word == HELD:
                pool, _, length = values.rpartition(".")
                return cls(pool, int(length), tenant) if length.isdigit() else None
            case _:
                return None


class Accounts:
    """Keeps the index through the store's own connections."""

    def __init__(self, values: Shards) -> None:
        self._values = values

    def stored(
        self, pool: StoredPool, tenant: str, pages: Sequence[str], dates_ms: Sequence[int], now_ms: int
    ) -> None:
        """Values of `tenant` are there until `dates_ms` at least."""
        key = _index(pool, tenant)
        self._values.integers(
            [
                (b"ZADD", key, b"GT", *_members(pool, pages, dates_ms)),
                (b"ZREMRANGEBYSCORE", key, b"-inf", b"%d" % now_ms),
                (b"PEXPIRE", key, _INDEX_TTL_MS),
            ]
        )

    def shortened(self, pool: StoredPool, tenant: str, pages: Sequence[str], date_ms: int) -> None:
        """Values of `tenant` are there until `date_ms` at most."""
        members = _members(pool, pages, [date_ms] * len(pages))
        self._values.integers([(b"ZADD", _index(pool, tenant), b"XX", b"LT", *members)])

    def held_bytes(self, pools: Sequence[StoredPool], tenant: str, now_ms: int) -> int | None:
        """What `tenant` has in these pools' namespaces; None if the server does not say."""
        counts = self._values.integers(
            [(b"ZCOUNT", _index(pool, tenant), b"(%d" % now_ms, b"+inf") for pool in pools]
        )
        if counts is None:
            return None
        return sum(count * pool.length for count, pool in zip(counts, pools, strict=True))


def _index(pool: StoredPool, tenant: str) -> bytes:
    return IndexKey(pool.name, pool.length, tenant).encode(pool.space)


def _members(pool: StoredPool, pages: Sequence[str], dates_ms: Sequence[int]) -> list[bytes]:
    tail = f":{pool.shard}" if pool.shard else ""
    words: list[bytes] = []
    for page, date in zip(pages, dates_ms, strict=True):
        words += [b"%d" % date, f"{page}{tail}".encode()]
    return words
