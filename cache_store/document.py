"""A JSON document as the ledger stores it, beside the turn whose key it bears.

Format, version 1; integers are little-endian.

    header   "LD" | version u8 | flags u8 (0) | xxh3-64 of key and body | key 16 bytes
    body     a zstd frame (RFC 8878) of the JSON text (RFC 8259)

A reader takes nothing but bytes whose checksum, version and key are what it asked for.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson
import xxhash
import zstandard

MAX_DOCUMENT_BYTES: Final = 256 * 1024 * 1024

_HEADER: Final = struct.Struct("<2sBBQ16s")
_MAGIC: Final = b"LD"
_VERSION: Final = 1
_ZSTD_LEVEL: Final = 3


class DocumentFormatError(ValueError):
    """Bytes that are not the document that was asked for."""


def encode_document(key: str, document: Mapping[str, Any]) -> bytes:
    """Bytes of a document; `key` is 16 bytes in hex."""
    raw_key = bytes.fromhex(key)
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(orjson.dumps(document))
    return _HEADER.pack(_MAGIC, _VERSION, 0, xxhash.xxh3_64_intdigest(raw_key + packed), raw_key) + packed


def decode_document(key: str, data: bytes) -> dict[str, Any]:
    """The document of these bytes. Raises `DocumentFormatError` unless they are that of `key`, unchanged."""
    if len(data) < _HEADER.size:
        raise DocumentFormatError("cut short")
    magic, version, flags, checksum, stored_key = _HEADER.unpack_from(data)
    if (magic, version, flags) != (_MAGIC, _VERSION, 0):
        raise DocumentFormatError("not a document of this version")
    packed = data[_HEADER.size :]
    if stored_key != bytes.fromhex(key) or xxhash.xxh3_64_intdigest(stored_key + packed) != checksum:
        raise DocumentFormatError("another document, or changed since it was written")
    try:
        text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_DOCUMENT_BYTES)
        document: object = orjson.loads(text)
    except (zstandard.ZstdError, ValueError) as error:
        raise DocumentFormatError(f"does not parse: {error}") from error
    if not isinstance(document, dict):
        raise DocumentFormatError("not an object")
    return cast("dict[str, Any]", document)
