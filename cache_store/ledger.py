"""The turn ledger: per tenant a tree of turns in Redis.

    longhaul:turns:TENANT:t:KEY      a turn (cache_store.turn)
    longhaul:turns:TENANT:d:DIGEST   list of versions, newest first: the turns that end at this visible digest
    longhaul:turns:TENANT:s:SESSION  list of the session's keys, oldest first; SESSION is a digest of its name
    longhaul:turns:TENANT:r:KEY      what an API keeps beside the turn KEY (cache_store.document)
    longhaul:secrets:NAME            32 random bytes, made when they are first asked for; they never expire

TENANT is percent-encoded (RFC 3986). A version is 56 bytes: key 16, parent 16 (zeros: none), digest of the
assistant message's reasoning 8, of the last call ids 8, of the session's name 8.

A turn and its list entries are written in one MULTI, so a turn is there as a whole or not at all. Looking up
a conversation takes two round trips, whatever its length: the versions of all its prefixes, then the turns of
one path. Every key lives for the ledger's time to live, which is renewed for a whole path when the path is
used and an eighth of it is gone.

Nothing is retried, and a connection whose reply did not come in time is closed: a late reply would be taken
for that of the next command.
"""

import asyncio
import hashlib
import secrets
import struct
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import quote

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache_store.document import DocumentFormatError, decode_document, encode_document
from cache_store.turn import KEY_BYTES, NO_PARENT, Turn, TurnFormatError, decode_turn, encode_turn

VERSIONS_KEPT: Final = 64
SESSION_TURNS_KEPT: Final = 1024
_VERSION: Final = struct.Struct("<16s16s8s8s8s")
_CONNECTIONS: Final = 64
SECRET_BYTES: Final = 32


class LedgerUnavailable(Exception):
    """Redis gave no answer in time, or an error."""


@dataclass(frozen=True, slots=True)
class Version:
    """One of the turns that end at a visible digest. Digests are 8 bytes, keys 16 bytes in hex."""

    key: str
    parent: str | None
    reasoning: bytes
    call_ids: bytes
    session: bytes


def new_key() -> str:
    """A key for a turn: unguessable, 16 bytes in hex."""
    return secrets.token_hex(KEY_BYTES)


class Ledger:
    """Client of the turn tree. Reads raise `LedgerUnavailable`; what is damaged counts as not there."""

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = 7 * 86_400,
        deadline_s: float = 0.5,
        write_deadline_s: float = 2.0,
    ) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`; `deadline_s` bounds each round trip of a read."""
        self.ttl_s = ttl_s
        self._deadline_s = deadline_s
        self._write_deadline_s = write_deadline_s
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=write_deadline_s,
            socket_connect_timeout=write_deadline_s,
            socket_timeout=write_deadline_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)

    async def ping(self) -> bool:
        """Whether Redis answers within the deadline."""
        try:
            async with _faults(self._deadline_s):
                return bool(await cast("Any", self._redis.ping()))
        except LedgerUnavailable:
            return False

    async def close(self) -> None:
        """Give the connections back."""
        await self._redis.aclose()

    async def versions(self, tenant: str, digests: Iterable[bytes]) -> list[list[Version]]:
        """For each digest the turns that end there, newest first; one round trip."""
        prefix = _prefix(tenant)
        async with _faults(self._deadline_s), self._redis.pipeline(transaction=False) as pipe:
            for digest in digests:
                pipe.lrange(f"{prefix}d:{digest.hex()}", 0, VERSIONS_KEPT - 1)
            lists = cast("list[list[bytes]]", await pipe.execute())
        return [[_unpack(data) for data in entries if len(data) == _VERSION.size] for entries in lists]

    async def turns(self, tenant: str, keys: Sequence[str]) -> list[Turn | None]:
        """The turns with these keys, None for each that is gone or damaged; one round trip."""
        if not keys:
            return []
        prefix = _prefix(tenant)
        async with _faults(self._deadline_s):
            stored = cast("list[bytes | None]", await self._redis.mget([f"{prefix}t:{key}" for key in keys]))
        return [_decode(key, data) for key, data in zip(keys, stored, strict=True)]

    async def session(self, tenant: str, session: str) -> list[Turn]:
        """The session's turns that are still there, oldest first; two round trips."""
        name = f"{_prefix(tenant)}s:{_session_digest(session)}"
        async with _faults(self._deadline_s):
            keys = cast("list[bytes]", await cast("Any", self._redis.lrange(name, 0, -1)))
        turns = await self.turns(tenant, [key.hex() for key in keys])
        return [turn for turn in turns if turn is not None]

    async def append(
        self, tenant: str, turn: Turn, version: Version, path: Sequence[tuple[str, bytes]] = ()
    ) -> bool:
        """Write a turn; True once Redis has acknowledged it. `path`: (key, digest) of ancestors to renew."""
        prefix = _prefix(tenant)
        data = encode_turn(turn)
        try:
            async with _faults(self._write_deadline_s), self._redis.pipeline(transaction=True) as pipe:
                pipe.set(f"{prefix}t:{turn.key}", data, ex=self.ttl_s)
                self._list(pipe, f"{prefix}d:{turn.digest.hex()}", _pack(version), newest_first=True)
                if turn.session:
                    name = f"{prefix}s:{_session_digest(turn.session)}"
                    self._list(pipe, name, bytes.fromhex(turn.key), newest_first=False)
                for key, digest in path:
                    pipe.expire(f"{prefix}t:{key}", self.ttl_s)
                    pipe.expire(f"{prefix}d:{digest.hex()}", self.ttl_s)
                await pipe.execute()
        except LedgerUnavailable:
            return False
        return True

    async def put_document(
        self, tenant: str, key: str, document: Mapping[str, Any], path: Sequence[str] = ()
    ) -> bool:
        """Keep a document beside a turn; True once Redis has acknowledged it. `path`: keys to renew."""
        prefix = _prefix(tenant)
        data = encode_document(key, document)
        try:
            async with _faults(self._write_deadline_s), self._redis.pipeline(transaction=True) as pipe:
                pipe.set(f"{prefix}r:{key}", data, ex=self.ttl_s)
                for ancestor in path:
                    pipe.expire(f"{prefix}r:{ancestor}", self.ttl_s)
                await pipe.execute()
        except LedgerUnavailable:
            return False
        return True

    async def documents(self, tenant: str, keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """The documents beside these turns, None for each that is gone or damaged; one round trip."""
        if not keys:
            return []
        prefix = _prefix(tenant)
        async with _faults(self._deadline_s):
            stored = cast("list[bytes | None]", await self._redis.mget([f"{prefix}r:{key}" for key in keys]))
        return [_decode_document(key, data) for key, data in zip(keys, stored, strict=True)]

    async def delete_document(self, tenant: str, key: str) -> bool:
        """Erase the document beside the turn `key`; whether there was one."""
        async with _faults(self._write_deadline_s):
            return bool(await cast("Any", self._redis.delete(f"{_prefix(tenant)}r:{key}")))

    async def secret(self, name: str) -> bytes:
        """The secret of that name: `SECRET_BYTES` random bytes, the same for every gateway on this ledger."""
        key = f"longhaul:secrets:{name}"
        async with _faults(self._deadline_s), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, secrets.token_bytes(SECRET_BYTES), nx=True)
            pipe.get(key)
            _, secret = cast("tuple[object, bytes | None]", await pipe.execute())
        if secret is None or len(secret) != SECRET_BYTES:
            raise LedgerUnavailable(f"{key} does not hold {SECRET_BYTES} bytes")
        return secret

    def _list(self, pipe: Any, name: str, entry: bytes, *, newest_first: bool) -> None:
        if newest_first:
            pipe.lpush(name, entry)
            pipe.ltrim(name, 0, VERSIONS_KEPT - 1)
        else:
            pipe.rpush(name, entry)
            pipe.ltrim(name, -SESSION_TURNS_KEPT, -1)
        pipe.expire(name, self.ttl_s)


@asynccontextmanager
async def _faults(deadline_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise LedgerUnavailable(str(error) or type(error).__name__) from error


def _prefix(tenant: str) -> str:
    return f"longhaul:turns:{quote(tenant, safe='')}:"


def _session_digest(session: str) -> str:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _pack(version: Version) -> bytes:
    return _VERSION.pack(
        bytes.fromhex(version.key),
        bytes.fromhex(version.parent) if version.parent else NO_PARENT,
        version.reasoning,
        version.call_ids,
        version.session,
    )


def _unpack(data: bytes) -> Version:
    key, parent, reasoning, call_ids, session = _VERSION.unpack(data)
    return Version(key.hex(), None if parent == NO_PARENT else parent.hex(), reasoning, call_ids, session)


def _decode(key: str, data: bytes | None) -> Turn | None:
    if data is None:
        return None
    try:
        return decode_turn(key, data)
    except TurnFormatError:
        return None


def _decode_document(key: str, data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        return decode_document(key, data)
    except DocumentFormatError:
        return None
