"""The pages of one call and where they lie on their chain; a pool as the store knows it."""

from collections.abc import Sequence
from dataclasses import dataclass

from cache_store import namespace
from cache_store.format import ValueId


@dataclass(frozen=True, slots=True)
class StoredPool:
    """What the values of one pool have in common.

    Attributes:
        name: SGLang's name of the pool.
        space: the pool's namespace, 16 bytes.
        shard: the part of each key that says whose part of a page it is.
        length: of each payload, in bytes.
    """

    name: str
    space: bytes
    shard: str
    length: int

    def keys(self, pages: Sequence[str]) -> list[bytes]:
        """The Redis keys of `pages`."""
        return namespace.page_keys(self.space, self.name, pages, self.shard)

    def values(self, pages: Sequence[str]) -> list[ValueId]:
        """What a reader has to know of each of `pages`."""
        return [ValueId(key, self.space, self.length) for key in self.keys(pages)]

    @property
    def record_bytes(self) -> int:
        """Length of what is under each key."""
        return ValueId(b"any", self.space, self.length).record_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Successive pages of a chain, by SGLang's hashes.

    Attributes:
        keys: the pages themselves.
        prefix: all pages before them, from the root on; None when SGLang does not say. It does with
            ``"hicache_storage_pass_prefix_keys": true`` in the extra config.
    """

    keys: Sequence[str]
    prefix: Sequence[str] | None = None

    @property
    def root(self) -> str | None:
        """The chain's first page; None where it is not known."""
        return None if self.prefix is None else next(iter([*self.prefix[:1], *self.keys[:1]]), None)

    @property
    def chain(self) -> list[str]:
        """All pages from the root to the span's end."""
        assert self.prefix is not None, "where the span lies is not known"
        return [*self.prefix, *self.keys]

    def positions(self) -> list[int] | None:
        """The position of each page, 1 the first of the chain; None where they are not known."""
        if self.prefix is None:
            return None
        return list(range(len(self.prefix) + 1, len(self.prefix) + len(self.keys) + 1))
