"""Reasoning that only this service can read: what `encrypted_content` of the Responses API holds.

    base64url( version u8 (1) | nonce 12 bytes | AES-256-GCM of the text as zstd frame (RFC 8878) )

The tenant's name is authenticated beside the text, so what was sealed for one tenant opens for no other. The
key lives in the ledger: every gateway on it opens what any of them has sealed. What does not verify is
nothing: the caller goes on without it. Source: NIST SP 800-38D (GCM), RFC 4648 section 5 (base64url).
"""

import base64
import binascii
import secrets
from typing import Final

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cache_store.ledger import Ledger, LedgerUnavailable

MAX_TEXT_BYTES: Final = 64 << 20

_SECRET_NAME: Final = "reasoning"
_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16


class ReasoningSeal:
    """Seals and opens one tenant's reasoning."""

    def __init__(self, key: bytes, tenant: str) -> None:
        self._cipher = AESGCM(key)
        self._associated = _VERSION + tenant.encode()

    def seal(self, text: str) -> str:
        """The text as `encrypted_content`."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        packed = zstandard.ZstdCompressor().compress(text.encode(errors="replace"))
        sealed = self._cipher.encrypt(nonce, packed, self._associated)
        return base64.urlsafe_b64encode(_VERSION + nonce + sealed).decode()

    def open(self, sealed: str) -> str | None:
        """The text, or None for anything that was not sealed here for this tenant, to the last bit."""
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(data) < 1 + _NONCE_BYTES + _TAG_BYTES or data[:1] != _VERSION:
            return None
        nonce, body = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        try:
            packed = self._cipher.decrypt(nonce, body, self._associated)
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_TEXT_BYTES).decode()
        except (InvalidTag, zstandard.ZstdError, UnicodeDecodeError):
            return None


class ReasoningSeals:
    """The seals of one gateway; the key is asked of the ledger once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._key: bytes | None = None

    async def of(self, tenant: str) -> ReasoningSeal | None:
        """The tenant's seal; None while the ledger has not given the key."""
        if self._key is None:
            try:
                self._key = await self._ledger.secret(_SECRET_NAME)
            except LedgerUnavailable:
                return None
        return ReasoningSeal(self._key, tenant)
