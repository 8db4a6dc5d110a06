"""What the ledger knows of a turn without its tokens: as a version at its digest, as an ancestor on a path.

A version is 56 bytes: key 16, parent 16 (zeros: none), digest of the assistant message's reasoning 8, of the
last call ids 8, of the session's name 8.
"""

import struct
from dataclasses import dataclass
from typing import Final

from cache_store.retention import TtlClass
from cache_store.turn import NO_PARENT, Turn

_FORMAT: Final = struct.Struct("<16s16s8s8s8s")
VERSION_BYTES: Final = _FORMAT.size


@dataclass(frozen=True, slots=True)
class Version:
    """One of the turns that end at a visible digest. Digests are 8 bytes, keys 16 bytes in hex."""

    key: str
    parent: str | None
    reasoning: bytes
    call_ids: bytes
    session: bytes


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A turn on the path of another, as far as its time to live goes."""

    key: str
    digest: bytes
    session: str
    ttl: TtlClass | None

    @classmethod
    def of(cls, turn: Turn) -> "Ancestor":
        """The ancestor that a turn is."""
        return cls(turn.key, turn.digest, turn.session, turn.ttl)


def pack_version(version: Version) -> bytes:
    """Bytes of a version."""
    return _FORMAT.pack(
        bytes.fromhex(version.key),
        bytes.fromhex(version.parent) if version.parent else NO_PARENT,
        version.reasoning,
        version.call_ids,
        version.session,
    )


def unpack_version(data: bytes) -> Version:
    """The version of `VERSION_BYTES` bytes."""
    key, parent, reasoning, call_ids, session = _FORMAT.unpack(data)
    return Version(key.hex(), None if parent == NO_PARENT else parent.hex(), reasoning, call_ids, session)
