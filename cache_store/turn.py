"""One turn of a conversation as the ledger stores it, and the format of its bytes.

Format, version 1. Integers in the header are little-endian; `varint` is unsigned LEB128 (DWARF 5, section
7.6); text is UTF-8 behind its length as a varint.

    header   "LT" | version u8 | class of its time to live u8 | xxh3-64 u64 | key 16 bytes
    body     a zstd frame (RFC 8878) of:
      parent 16 bytes (zeros: none) | digest 16 | head 8
      created_ms | renewed_ms | messages | tail start | tail length | highest id varints
      usage: prompt, completion, reasoning, cached on device, on host, in storage  varints
      session | finish                                                             texts
      marks: count as varint, then 21 bytes each
      prompt, completion, closing: count as varint, bytes per id u8, ids little-endian
      reasoning                                                                    text
      calls: count as varint, then id, name, arguments                             texts

The classes are those of `cache_store.retention`: 0 none, 1 `5m`, 2 `1h`, 3 `24h`. The checksum is that of key
and body, seeded with the class.

A reader takes nothing but bytes whose checksum, version and key are what it asked for.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson
import xxhash
import zstandard

from cache_store.retention import TtlClass

KEY_BYTES: Final = 16
DIGEST_BYTES: Final = 16
SHORT_BYTES: Final = 8
MARK_BYTES: Final = 21
NO_PARENT: Final = bytes(KEY_BYTES)
MAX_TURN_BYTES: Final = 256 * 1024 * 1024

_HEADER: Final = struct.Struct("<2sBBQ16s")
_MAGIC: Final = b"LT"
_VERSION: Final = 1
_ZSTD_LEVEL: Final = 3
_CLASSES: Final[tuple[TtlClass | None, ...]] = (None, "5m", "1h", "24h")


class TurnFormatError(ValueError):
    """Bytes that are not the turn that was asked for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request and its completion add to a conversation.

    key, parent: 16 bytes each, in hex; parent is None for a turn that starts from nothing.
    digest: of the conversation up to and including this turn's assistant message. head: of what stands before
    the first message.
    messages: how many messages the conversation has then; marks: one for each of those that this turn adds.
    prompt: ids that the request adds to the parent's tokens; tail: (start, length) of the part of them that
    speaks for this turn only. completion: ids exactly as sampled; closing: ids that close what was cut.
    calls: (id, name, arguments). highest: the highest of all these ids. usage: the six counts of the format.
    Times are Unix times in ms; renewed_ms is when the path's time to live was last renewed; ttl is the class
    that the client asked for.
    """

    key: str
    parent: str | None
    session: str
    digest: bytes
    head: bytes
    created_ms: int
    renewed_ms: int
    messages: int
    marks: tuple[bytes, ...]
    prompt: Sequence[int]
    tail: tuple[int, int]
    completion: Sequence[int]
    closing: Sequence[int]
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    finish: str
    highest: int
    usage: tuple[int, ...]
    ttl: TtlClass | None = None
    _json: dict[bool, bytes] = field(default_factory=dict[bool, bytes], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.key) == 2 * KEY_BYTES and len(self.digest) == DIGEST_BYTES
        assert len(self.head) == SHORT_BYTES and len(self.usage) == 6
        assert 0 < len(self.marks) <= self.messages, "a turn adds its assistant message at least"
        assert all(len(mark) == MARK_BYTES for mark in self.marks)
        start, length = self.tail
        assert start >= 0 and length >= 0 and start + length <= len(self.prompt)

    def tokens(self, *, keep_tail: bool = True) -> "array[int]":
        """What this turn adds to the conversation's tokens."""
        tokens = array("I", self.prompt)
        if not keep_tail:
            start, length = self.tail
            del tokens[start : start + length]
        tokens.extend(self.completion)
        tokens.extend(self.closing)
        return tokens

    def tokens_json(self, *, keep_tail: bool = True) -> bytes:
        """The same in JSON, without brackets; made when it is first asked for."""
        encoded = self._json.get(keep_tail)
        if encoded is None:
            encoded = self._json[keep_tail] = orjson.dumps(self.tokens(keep_tail=keep_tail).tolist())[1:-1]
        return encoded


def encode_turn(turn: Turn) -> bytes:
    """Bytes of a turn."""
    body = bytearray(bytes.fromhex(turn.parent) if turn.parent else NO_PARENT)
    body += turn.digest + turn.head
    counts = (turn.created_ms, turn.renewed_ms, turn.messages, *turn.tail, turn.highest, *turn.usage)
    for number in counts:
        _put_varint(body, number)
    _put_text(body, turn.session)
    _put_text(body, turn.finish)
    _put_varint(body, len(turn.marks))
    body += b"".join(turn.marks)
    for ids in (turn.prompt, turn.completion, turn.closing):
        _put_ids(body, ids)
    _put_text(body, turn.reasoning)
    _put_varint(body, len(turn.calls))
    for call in turn.calls:
        for text in call:
            _put_text(body, text)
    key = bytes.fromhex(turn.key)
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    ttl = _CLASSES.index(turn.ttl)
    checksum = xxhash.xxh3_64_intdigest(key + packed, seed=ttl)
    return _HEADER.pack(_MAGIC, _VERSION, ttl, checksum, key) + packed


def decode_turn(key: str, data: bytes) -> Turn:
    """The turn of these bytes. Raises `TurnFormatError` unless they are that of `key`, unchanged."""
    if len(data) < _HEADER.size:
        raise TurnFormatError("cut short")
    magic, version, ttl, checksum, stored_key = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, _VERSION) or ttl >= len(_CLASSES):
        raise TurnFormatError("not a turn of this version")
    if stored_key != bytes.fromhex(key):
        raise TurnFormatError("another turn")
    packed = data[_HEADER.size :]
    if xxhash.xxh3_64_intdigest(stored_key + packed, seed=ttl) != checksum:
        raise TurnFormatError("changed since it was written")
    try:
        body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_TURN_BYTES)
        return _parse(key, _Reader(body), _CLASSES[ttl])
    except (zstandard.ZstdError, IndexError, ValueError, AssertionError) as error:
        raise TurnFormatError(f"does not parse: {error}") from error


def _parse(key: str, reader: "_Reader", ttl: TtlClass | None) -> Turn:
    parent, digest, head = (reader.take(size) for size in (KEY_BYTES, DIGEST_BYTES, SHORT_BYTES))
    created_ms, renewed_ms, messages, start, length, highest = (reader.varint() for _ in range(6))
    usage = tuple(reader.varint() for _ in range(6))
    session, finish = reader.text(), reader.text()
    marks = tuple(reader.take(MARK_BYTES) for _ in range(reader.varint()))
    prompt, completion, closing = (reader.ids() for _ in range(3))
    reasoning = reader.text()
    calls = tuple((reader.text(), reader.text(), reader.text()) for _ in range(reader.varint()))
    return Turn(
        key=key,
        parent=None if parent == NO_PARENT else parent.hex(),
        session=session,
        digest=digest,
        head=head,
        created_ms=created_ms,
        renewed_ms=renewed_ms,
        messages=messages,
        marks=marks,
        prompt=prompt,
        tail=(start, length),
        completion=completion,
        closing=closing,
        reasoning=reasoning,
        calls=calls,
        finish=finish,
        highest=highest,
        usage=usage,
        ttl=ttl,
    )


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("cut short")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def text(self) -> str:
        return self.take(self.varint()).decode()

    def ids(self) -> "array[int]":
        count = self.varint()
        width = self.take(1)[0]
        packed = self.take(count * width)
        spread = bytearray(4 * count)
        for place in range(width):
            spread[place::4] = packed[place::width]
        ids = array("I")
        ids.frombytes(spread)
        return ids


def _put_varint(body: bytearray, number: int) -> None:
    while number > 0x7F:
        body.append(number & 0x7F | 0x80)
        number >>= 7
    body.append(number)


def _put_text(body: bytearray, text: str) -> None:
    data = text.encode(errors="replace")
    _put_varint(body, len(data))
    body += data


def _put_ids(body: bytearray, ids: Sequence[int]) -> None:
    """As few bytes for each id as the largest needs; varints take 5 % less after zstd, but a loop."""
    width = max(1, (max(ids, default=0).bit_length() + 7) // 8)
    spread = array("I", ids).tobytes()
    packed = bytearray(len(ids) * width)
    for place in range(width):
        packed[place::width] = spread[place::4]
    _put_varint(body, len(ids))
    body.append(width)
    body += packed
