"""The turn ledger: per tenant a tree of turns in Redis.

    longhaul:turns:TENANT:t:KEY      a turn (cache_store.turn)
    longhaul:turns:TENANT:d:DIGEST   list of versions, newest first: the turns that end at this visible digest
    longhaul:turns:TENANT:s:SESSION  list of the session's keys, oldest first; SESSION is a digest of its name
    longhaul:turns:TENANT:r:KEY      what an API keeps beside the turn KEY (cache_store.document)
    longhaul:stored:TENANT:...       how many bytes those of t and r are (cache_store.stored_bytes)
    longhaul:quota:TENANT:...        what the tenant has taken of its quotas (cache_store.allowances)
    longhaul:secrets:NAME            32 random bytes, made when they are first asked for; they never expire

TENANT is percent-encoded (RFC 3986), versions are those of `cache_store.version`.

A turn and its list entries are written in one MULTI, so a turn is there as a whole or not at all. Looking up
a conversation takes two round trips, whatever its length: the versions of all its prefixes, then the turns of
one path. A turn lives for the time of its class, which is renewed for a whole path when the path is used and
an eighth of it is gone; lists live as long as the longest class.

Nothing is retried but the writing of a turn, and a connection whose reply did not come in time is closed: a
late reply would be taken for that of the next command.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast
from urllib.parse import quote

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cache_store import stored_bytes
from cache_store.decoded import DEFAULT_BUDGET_BYTES, DecodedTurns
from cache_store.document import DocumentFormatError, decode_document, encode_document
from cache_store.retention import TtlClass
from cache_store.turn import KEY_BYTES, Turn, encode_turn
from cache_store.version import VERSION_BYTES, Ancestor, Version, pack_version, unpack_version

VERSIONS_KEPT: Final = 64
DEFAULT_TTL_S: Final = 7 * 86_400
SESSION_TURNS_READ: Final = 1024
_ERASED_AT_ONCE: Final = 256
_READ_LISTS: Final = """
local lists = {}
for place, key in ipairs(KEYS) do lists[place] = redis.call('LRANGE', key, 0, ARGV[1]) end
return lists
"""
"""One command for all lists of a conversation: one for each costs the client more than anything else."""
_CONNECTIONS: Final = 64
SECRET_BYTES: Final = 32
_RETRY_PAUSE_S: Final = 0.1
_ABSENCES: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError, TimeoutError)
"""What a server that restarts looks like; any other error it would make again."""


class LedgerUnavailable(Exception):
    """Redis gave no answer in time, or an error."""


def new_key() -> str:
    """A key for a turn: unguessable, 16 bytes in hex."""
    return secrets.token_hex(KEY_BYTES)


class Ledger:
    """Client of the turn tree. Reads raise `LedgerUnavailable`; what is damaged counts as not there."""

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = DEFAULT_TTL_S,
        class_ttl_s: Mapping[TtlClass, int] | None = None,
        deadline_s: float = 0.5,
        write_deadline_s: float = 2.0,
        decoded_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        """`url` is `redis://`, `rediss://` or `unix://`; `deadline_s` bounds each round trip of a read.

        `ttl_s` is for turns of no class, and of those that `class_ttl_s` leaves out. `decoded_bytes` bounds
        the memory of decoded turns.
        """
        self.ttl_s = ttl_s
        self._class_ttl_s = dict(class_ttl_s or {})
        self._index_ttl_s = max(ttl_s, *self._class_ttl_s.values(), 0)
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
        self._scripts: dict[str, Any] = {}
        self._decoded = DecodedTurns(decoded_bytes)
        self._absent = False

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

    def ttl_of(self, ttl: TtlClass | None) -> int:
        """The time to live of a class, in seconds."""
        return self.ttl_s if ttl is None else self._class_ttl_s.get(ttl, self.ttl_s)

    async def versions(self, tenant: str, digests: Iterable[bytes]) -> list[list[Version]]:
        """For each digest the turns that end there, newest first; one round trip."""
        prefix = _prefix(tenant)
        keys = [f"{prefix}d:{digest.hex()}" for digest in digests]
        if not keys:
            return []
        lists: list[list[bytes]] = await self.run_script(_READ_LISTS, keys, [VERSIONS_KEPT - 1])
        return [[unpack_version(data) for data in entries if len(data) == VERSION_BYTES] for entries in lists]

    async def turns(self, tenant: str, keys: Sequence[str]) -> list[Turn | None]:
        """The turns with these keys, None for each that is gone or damaged; one round trip."""
        if not keys:
            return []
        prefix = _prefix(tenant)
        async with _faults(self._deadline_s):
            stored = cast("list[bytes | None]", await self._redis.mget([f"{prefix}t:{key}" for key in keys]))
        return [self._decoded.decode(key, data) for key, data in zip(keys, stored, strict=True)]

    async def session(self, tenant: str, session: str) -> list[Turn]:
        """The session's turns that are still there, oldest first; two round trips.

        Of a longer session the newest `SESSION_TURNS_READ`.
        """
        name = f"{_prefix(tenant)}s:{_session_digest(session)}"
        async with _faults(self._deadline_s):
            keys = cast("list[bytes]", await cast("Any", self._redis.lrange(name, -SESSION_TURNS_READ, -1)))
        turns = await self.turns(tenant, [key.hex() for key in keys])
        return [turn for turn in turns if turn is not None]

    async def append(self, tenant: str, turn: Turn, version: Version, path: Sequence[Ancestor] = ()) -> bool:
        """Write a turn; True once Redis has acknowledged it. `path`: ancestors to renew.

        A server that restarts is waited for, within the deadline for writes, unless the last turn waited for
        it in vain.
        """
        end = time.monotonic() + self._write_deadline_s
        again = False
        while True:
            try:
                left_s = max(0.0, end - time.monotonic())
                await self._append(tenant, turn, version, path, left_s, again=again)
            except LedgerUnavailable as error:
                if not isinstance(error.__cause__, _ABSENCES):
                    return False
                if self._absent or time.monotonic() + _RETRY_PAUSE_S > end:
                    self._absent = True
                    return False
            else:
                self._absent = False
                return True
            again = True
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _append(
        self,
        tenant: str,
        turn: Turn,
        version: Version,
        path: Sequence[Ancestor],
        deadline_s: float,
        *,
        again: bool = False,
    ) -> None:
        prefix = _prefix(tenant)
        data, ttl_s = encode_turn(turn), self.ttl_of(turn.ttl)
        async with _faults(deadline_s), self._redis.pipeline(transaction=True) as pipe:
            # All of it was written, or nothing: only the reply may have been lost.
            if again and await cast("Any", self._redis.exists(f"{prefix}t:{turn.key}")):
                return
            pipe.set(f"{prefix}t:{turn.key}", data, ex=ttl_s)
            self._count(pipe, tenant, f"t:{turn.key}", len(data), ttl_s)
            self._list(pipe, f"{prefix}d:{turn.digest.hex()}", pack_version(version), newest_first=True)
            if turn.session:
                name = f"{prefix}s:{_session_digest(turn.session)}"
                self._list(pipe, name, bytes.fromhex(turn.key), newest_first=False)
            for ancestor in path:
                pipe.expire(f"{prefix}t:{ancestor.key}", self.ttl_of(ancestor.ttl))
                pipe.expire(f"{prefix}d:{ancestor.digest.hex()}", self._index_ttl_s)
            for session in {ancestor.session for ancestor in path} - {turn.session, ""}:
                pipe.expire(f"{prefix}s:{_session_digest(session)}", self._index_ttl_s)
            await pipe.execute()

    async def put_document(
        self, tenant: str, key: str, document: Mapping[str, Any], path: Sequence[str] = ()
    ) -> bool:
        """Keep a document beside a turn; True once Redis has acknowledged it. `path`: keys to renew."""
        prefix = _prefix(tenant)
        data = encode_document(key, document)
        try:
            async with _faults(self._write_deadline_s), self._redis.pipeline(transaction=True) as pipe:
                pipe.set(f"{prefix}r:{key}", data, ex=self.ttl_s)
                self._count(pipe, tenant, f"r:{key}", len(data), self.ttl_s)
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
        return bool(await self._erase(tenant, [f"r:{key}"]))

    async def erase_session(self, tenant: str, session: str) -> int:
        """Erase a session's turns, their places under digests, and what stands beside them; how many turns.

        Turns of other sessions that continue from these lose what they continue. Raises `LedgerUnavailable`,
        and may then be called again: what is not yet erased is still listed.
        """
        prefix = _prefix(tenant)
        name = f"{prefix}s:{_session_digest(session)}"
        erased = 0
        while True:
            async with _faults(self._write_deadline_s):
                entries = cast(
                    "list[bytes]", await cast("Any", self._redis.lrange(name, 0, _ERASED_AT_ONCE - 1))
                )
            if not entries:
                return erased
            keys = [entry.hex() for entry in entries]
            places = await self._places(tenant, await self.turns(tenant, keys))
            removed = await self._erase(
                tenant,
                [f"{kind}:{key}" for key in keys for kind in "tr"],
                lambda pipe, places=places, entries=entries: _unlist(pipe, name, entries, places),
            )
            self._decoded.forget(keys)
            erased += sum(value.startswith("t:") for value in removed)

    async def stored_bytes(self, tenant: str) -> int:
        """How many bytes of the ledger are the tenant's; one round trip."""
        async with _faults(self._deadline_s):
            now_ms = int(time.time() * 1000)
            return await stored_bytes.stored_bytes(
                self._redis, quote(tenant, safe=""), _prefix(tenant), now_ms
            )

    async def run_script(self, text: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """The answer to one of the project's Lua scripts, within the deadline of a read."""
        script = self._scripts.get(text)
        if script is None:
            script = self._scripts[text] = self._redis.register_script(text)
        async with _faults(self._deadline_s):
            return await script(keys=keys, args=args)

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

    async def _places(self, tenant: str, turns: Sequence[Turn | None]) -> list[tuple[str, bytes]]:
        """Where turns are listed as versions: (list, entry)."""
        found = [turn for turn in turns if turn is not None]
        lists = [f"{_prefix(tenant)}d:{turn.digest.hex()}" for turn in found]
        async with _faults(self._write_deadline_s), self._redis.pipeline(transaction=False) as pipe:
            for name in lists:
                pipe.lrange(name, 0, -1)
            entries = cast("list[list[bytes]]", await pipe.execute())
        return [
            (name, entry)
            for name, turn, listed in zip(lists, found, entries, strict=True)
            for entry in listed
            if entry.startswith(bytes.fromhex(turn.key))
        ]

    async def _erase(
        self, tenant: str, names: Sequence[str], also: Callable[[Any], None] | None = None
    ) -> list[str]:
        """Erase values by their names without the tenant's prefix; which of them were there."""
        prefix = _prefix(tenant)
        async with _faults(self._write_deadline_s):
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.strlen(f"{prefix}{name}")
                sizes = cast("list[int]", await pipe.execute())
            there = [(name, size) for name, size in zip(names, sizes, strict=True) if size]
            async with self._redis.pipeline(transaction=True) as pipe:
                for name, _ in there:
                    pipe.delete(f"{prefix}{name}")
                stored_bytes.discount(pipe, quote(tenant, safe=""), there)
                if also is not None:
                    also(pipe)
                await pipe.execute()
        return [name for name, _ in there]

    def _count(self, pipe: Any, tenant: str, name: str, size: int, ttl_s: int) -> None:
        stored_bytes.count(
            pipe,
            quote(tenant, safe=""),
            name,
            size,
            now_ms=int(time.time() * 1000),
            ttl_s=ttl_s,
            index_ttl_s=self._index_ttl_s,
        )

    def _list(self, pipe: Any, name: str, entry: bytes, *, newest_first: bool) -> None:
        if newest_first:
            pipe.lpush(name, entry)
            pipe.ltrim(name, 0, VERSIONS_KEPT - 1)
        else:
            pipe.rpush(name, entry)
        pipe.expire(name, self._index_ttl_s)


@asynccontextmanager
async def _faults(deadline_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        raise LedgerUnavailable(str(error) or type(error).__name__) from error


def _unlist(pipe: Any, session: str, entries: Sequence[bytes], places: Sequence[tuple[str, bytes]]) -> None:
    pipe.ltrim(session, len(entries), -1)
    for name, entry in places:
        pipe.lrem(name, 1, entry)


def _prefix(tenant: str) -> str:
    return f"longhaul:turns:{quote(tenant, safe='')}:"


def _session_digest(session: str) -> str:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _decode_document(key: str, data: bytes | None) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        return decode_document(key, data)
    except DocumentFormatError:
        return None
