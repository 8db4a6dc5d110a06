"""Names of pages in the store, as SGLang computes them, without its C++ extension.

SGLang compiles `mem_cache/cpp_utils/hash_binding.cpp` when the first prompt is looked up, which takes a
compiler and the headers of OpenSSL and Python; where one is missing, every look-up fails and nothing is ever
restored. The names are the same here, so that engines with and without it share a store.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

_WIDE = 1 << 32
# An odd number of bytes before 64-bit tokens, so that they never hash like 32-bit ones.
_WIDE_TAG = b"\xff"


def page_hash(token_ids: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """SHA-256 of the tokens after `prior_digest`, in hexadecimal; with `page_size`, one for each page.

    In place of `sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash`.
    """
    from sglang.srt.mem_cache.cpp_utils.native_hash import (
        _native_hash_input,  # pyright: ignore[reportPrivateUsage]  # flattens SGLang's own key types
    )

    raw, length, width, is_bigram = _native_hash_input(token_ids)
    if page_size is None:
        return digest_chain(raw, length, width, is_bigram, prior_digest, max(length, 1), at_least=1)[0]
    return digest_chain(raw, length, width, is_bigram, prior_digest, page_size)


def digest_chain(
    raw: Sequence[int],
    length: int,
    width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int,
    at_least: int = 0,
) -> list[str]:
    """The chain of digests over `length` units in pages of `page_size`.

    A unit is `width` numbers of `raw`; a bigram unit is a number and the one after it. Numbers are hashed as
    little-endian uint32, or a page that has a larger one as uint64 after a tag.
    """
    if page_size <= 0:
        raise ValueError(f"page_size is {page_size}: it must be positive")
    if prior_digest is not None and len(prior_digest) != hashlib.sha256().digest_size:
        raise ValueError(f"prior_digest has {len(prior_digest)} bytes: it must have 32")
    digests: list[str] = []
    before = prior_digest or b""
    pages = max(at_least, -(-length // page_size))
    for start in range(0, pages * page_size, page_size):
        end = min(start + page_size, length)
        if is_bigram:
            words = [raw[i + step] for i in range(start, end) for step in (0, 1)]
        else:
            words = raw[start * width : end * width]
        before = hashlib.sha256(before + _bytes(words)).digest()
        digests.append(before.hex())
    return digests


def _bytes(words: Sequence[int]) -> bytes:
    if not words or max(words) < _WIDE:
        return array("I", words).tobytes()
    return _WIDE_TAG + array("Q", words).tobytes()
