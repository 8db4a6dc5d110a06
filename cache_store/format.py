"""The stored form of one value: a page of KV or a state, as bytes in Redis.

A value is a *payload* of known length that belongs to one Redis key. It is stored as

- one *whole* record ``header + payload`` under its key, when the payload fits into one chunk; else
- *chunk* records ``header + part of the payload``, each under a key of its own, and then, under the
  value's key, a *manifest* record ``header + digests of the chunks``.

So the record under the value's key is written last, by one command, and is the commit point: it is there
with everything it names, or the value does not exist.

A reader never parses its way to an answer. It knows key, namespace and length of what it wants, builds
the header that a writer would have written for exactly the bytes it received, and compares all 80 bytes.
Whatever differs (a flipped bit, another key's blob, another version, a cut) differs there, and is a miss.

The layout is specified byte by byte in ``cache_store/README.md``. Nothing here does I/O.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

MAGIC = b"LHKV"
VERSION = 1
DIGEST_BYTES = 16
HEADER_BYTES = 80
# 4 MiB less a page, so that a record with its header and the server's string header still falls into the
# allocator's 4 MiB class. Redis' CPU time per byte written rises fourfold above 6 MiB.
CHUNK_BYTES = 4 * 1024 * 1024 - 4096

# magic, version, kind, reserved, chunk index, chunk count, payload length, body length, digests of key,
# namespace and body. Little-endian, no padding.
_HEADER = struct.Struct("<4sBBHIIQQ16s16s16s")
assert _HEADER.size == HEADER_BYTES
_KEY_DIGEST_AT = 32

Segments = Sequence[memoryview]


class Kind(IntEnum):
    """What follows a header."""

    WHOLE = 0
    """the payload"""
    MANIFEST = 1
    """the digests of all chunks, 16 bytes each, in order"""
    CHUNK = 2
    """one part of the payload"""


@dataclass(frozen=True, slots=True)
class ValueId:
    """What a reader knows of a value before it reads one byte of it.

    Attributes:
        key: the value's Redis key.
        namespace: digest of everything that decides whether an engine can read the payload, 16 bytes.
        length: of the payload, in bytes.
    """

    key: bytes
    namespace: bytes
    length: int

    def __post_init__(self) -> None:
        assert self.key, "a value needs a key"
        assert len(self.namespace) == DIGEST_BYTES, f"namespace of {len(self.namespace)} bytes"
        assert self.length > 0, f"payload of {self.length} bytes"

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the payload, at least 1."""
        return -(-self.length // CHUNK_BYTES)

    @property
    def is_whole(self) -> bool:
        """Whether the value is stored as one record."""
        return self.length <= CHUNK_BYTES

    @property
    def record_bytes(self) -> int:
        """Length of the record under the value's key, in bytes: what ``STRLEN`` must say."""
        return HEADER_BYTES + (self.length if self.is_whole else self.chunk_count * DIGEST_BYTES)


def digest(segments: Segments) -> bytes:
    """XXH3-128 of the concatenation of `segments`, canonical (big-endian) form, 16 bytes."""
    if len(segments) == 1:
        return xxhash.xxh3_128_digest(segments[0])
    state = xxhash.xxh3_128()
    for segment in segments:
        state.update(segment)
    return state.digest()


def cut(segments: Segments, part_bytes: int = CHUNK_BYTES) -> list[list[memoryview]]:
    """Cut the concatenation of `segments` into parts of `part_bytes`; the last may be shorter.

    No byte is copied: the parts are views into the segments.
    """
    assert part_bytes > 0, f"parts of {part_bytes} bytes"
    parts: list[list[memoryview]] = []
    room = 0
    for segment in segments:
        start = 0
        while start < len(segment):
            if room == 0:
                parts.append([])
                room = part_bytes
            taken = min(room, len(segment) - start)
            parts[-1].append(segment[start : start + taken])
            start += taken
            room -= taken
    return parts


def whole_header(value: ValueId, payload: Segments) -> bytes:
    """The header of the record that holds all of `payload`, which must have `value.length` bytes."""
    assert value.is_whole, f"{value.length} bytes do not fit into one chunk"
    return _header(value, Kind.WHOLE, 0, value.length, digest(payload))


def names(header: bytes, value: ValueId) -> bool:
    """Whether a header says that it belongs to `value`: a reason to look at what follows, and no more."""
    return header[_KEY_DIGEST_AT : _KEY_DIGEST_AT + DIGEST_BYTES] == xxhash.xxh3_128_digest(value.key)


def chunk_header(value: ValueId, index: int, body_digest: bytes) -> bytes:
    """The header of chunk `index`, whose part of the payload has `body_digest`."""
    body_bytes = min(CHUNK_BYTES, value.length - index * CHUNK_BYTES)
    assert 0 <= index < value.chunk_count, f"chunk {index} of {value.chunk_count}"
    return _header(value, Kind.CHUNK, index, body_bytes, body_digest)


def manifest(value: ValueId, chunk_digests: Sequence[bytes]) -> bytes:
    """The manifest record: its header and the digest of each chunk."""
    assert len(chunk_digests) == value.chunk_count, (
        f"{len(chunk_digests)} digests, {value.chunk_count} chunks"
    )
    body = b"".join(chunk_digests)
    return _header(value, Kind.MANIFEST, 0, len(body), xxhash.xxh3_128_digest(body)) + body


def read_manifest(value: ValueId, record: bytes | bytearray | memoryview) -> list[bytes] | None:
    """The digests of the chunks that `record` names, or None unless it is `value`'s own manifest."""
    record = bytes(record)
    if value.is_whole or len(record) != value.record_bytes:
        return None
    body = record[HEADER_BYTES:]
    digests = [body[at : at + DIGEST_BYTES] for at in range(0, len(body), DIGEST_BYTES)]
    return digests if manifest(value, digests) == record else None


def chunk_keys(value: ValueId, chunk_digests: Sequence[bytes]) -> list[bytes]:
    """The Redis keys of the chunks that a manifest with `chunk_digests` names, in order.

    They carry the payload's own digest, so that two writers of one key, whose payloads may differ in the
    last bit, never mix their chunks.
    """
    content = xxhash.xxh3_128_hexdigest(b"".join(chunk_digests)).encode()
    return [b"%b:%b:%d" % (value.key, content, index) for index in range(len(chunk_digests))]


def _header(value: ValueId, kind: Kind, index: int, body_bytes: int, body_digest: bytes) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        0,
        index,
        value.chunk_count,
        value.length,
        body_bytes,
        xxhash.xxh3_128_digest(value.key),
        value.namespace,
        body_digest,
    )
