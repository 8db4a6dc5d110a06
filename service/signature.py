"""Signatures of turns: a turn's ledger key under an HMAC, for clients to send back beside its reasoning.

    base64url, no padding, of:  version u8 (1) | turn key 16 bytes | HMAC-SHA256 (RFC 2104) 32 bytes
    authenticated:              "longhaul signature" | version | turn key | tenant in UTF-8

The key of the HMAC is a secret of the ledger, so that it outlives every gateway and all of them share it. A
signature names a turn and proves nothing about a conversation: it chooses among the turns that the visible
digest allows. So one that is foreign, altered, or another tenant's is merely not read.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Final

from cache_store.ledger import SECRET_BYTES, Ledger, LedgerUnavailable
from cache_store.turn import KEY_BYTES

log = logging.getLogger(__name__)

_VERSION: Final = b"\x01"
_PURPOSE: Final = b"longhaul signature"
_SIGNATURE_BYTES: Final = 1 + KEY_BYTES + hashlib.sha256().digest_size
_SIGNATURE_CHARS: Final = -(-_SIGNATURE_BYTES * 8 // 6)
_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs and reads the signatures of one tenant's turns."""

    secret: bytes
    tenant: str

    def sign(self, turn: str) -> str:
        """The signature of a turn, by its key (16 bytes in hex)."""
        key = bytes.fromhex(turn)
        signed = _VERSION + key + self._mac(key)
        return base64.urlsafe_b64encode(signed).decode().rstrip("=")

    def turn_of(self, signature: str) -> str | None:
        """The key of the turn, or None for whatever this service did not sign for this tenant."""
        if len(signature) != _SIGNATURE_CHARS or not signature.isascii():
            return None
        try:
            data = base64.b64decode(signature + "=" * (-len(signature) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        key, mac = data[1 : 1 + KEY_BYTES], data[1 + KEY_BYTES :]
        if data[:1] != _VERSION or not hmac.compare_digest(mac, self._mac(key)):
            return None
        return key.hex()

    def _mac(self, key: bytes) -> bytes:
        message = _PURPOSE + _VERSION + key + self.tenant.encode()
        return hmac.digest(self.secret, message, hashlib.sha256)


class Signatures:
    """Signers over the ledger's secret.

    While the ledger can't be asked, turns are signed with a secret that dies with the process: clients refuse
    reasoning without a signature, and such a one is as foreign as any other later.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._secret: bytes | None = None
        self._stopgap = secrets.token_bytes(SECRET_BYTES)
        self._asked_at = -_RETRY_S

    async def signer(self, tenant: str) -> Signer:
        """The signer for a tenant. Never fails for a fault of the ledger."""
        if self._secret is None and time.monotonic() - self._asked_at >= _RETRY_S:
            try:
                self._secret = await self._ledger.secret("signature")
            except LedgerUnavailable as error:
                self._asked_at = time.monotonic()
                log.warning("the ledger has no secret to sign with (%s): signing for the moment alone", error)
        return Signer(self._secret or self._stopgap, tenant)
