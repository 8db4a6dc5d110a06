"""Values in and out of a Redis server, where every fault is a miss.

No method raises for anything that the server, the network or the stored bytes do. What is read is true or
is not there; what can't be written waits for another try (`cache_store.retries`). A thread of its own
probes a server that was found dead, looks its name up again, and takes up the failed writes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store import life, metrics, transfer
from cache_store.breaker import Breaker, State
from cache_store.format import Segments, ValueId
from cache_store.life import Life
from cache_store.options import StoreOptions
from cache_store.resp import Connection, Status
from cache_store.retries import RetryQueue
from cache_store.stream import Deadline, ServerRefused, WireError
from cache_store.wire import BlobClient

_TICK_S = 0.2
_CLEAR_TIMEOUT_S = 60.0
_CLEAR_KEYS = 1000
# What moves values may take all of a call's time. What only asks takes milliseconds and gets half: a server
# that stopped answering is found out by a lookup, as a rule, and every request waits for one.
_BULK = frozenset({"read", "write", "retry"})
_SHORT = 0.5
# Share of a call's time that counts as all of it.
_WHOLE = 0.95
_OLDEST = (6, 2)
# What a server in good health answers to a command that it does not know or does not permit.
_HEALTHY = frozenset({"ERR", "NOPERM", "READONLY", "WRONGTYPE"})


class ValueStore:
    """Reads, writes and finds values by `ValueId`. Thread-safe; close it to flush what waits for a retry."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._client = BlobClient(options.url, idle=options.connections)
        self._breaker = Breaker(threshold=options.breaker_failures, cooldown_s=options.breaker_cooldown_s)
        self._retries = RetryQueue(max_bytes=options.retry_bytes, max_attempts=options.retry_attempts)
        self.faults = metrics.Faults()
        """Where faults are counted and logged."""
        self._wake = threading.Event()
        self._closing = False
        metrics.BREAKER.labels(str(self)).set(State.CLOSED)
        self._thread = threading.Thread(target=self._upkeep, name="longhaul-store", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return str(self._client.endpoint)

    @property
    def breaker_state(self) -> State:
        """Whether the server is asked at present."""
        return self._breaker.state

    @property
    def waiting(self) -> int:
        """Number of failed writes that wait for another try."""
        return len(self._retries)

    def find(self, keys: Sequence[bytes], record_bytes: Sequence[int]) -> list[bool]:
        """Under which keys there is a value whose record has the given length, in one round trip."""
        found = [False] * len(keys)

        def work(connection: Connection) -> None:
            found[:] = transfer.find(connection, keys, record_bytes)

        self._call("lookup", work)
        return found

    def fetch(
        self, values: Sequence[ValueId], targets: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        """Read each value's payload into its target, the views of which together have its length.

        True for each payload that is now in its target, checked to the last byte. Of a target whose value
        is False the content is undefined. What was read lives for another `life_ms` at least
        (0: as long as it would have).
        """
        done = [False] * len(values)
        self._call("read", lambda c: transfer.read(c, values, targets, done, life_ms, self.faults.count))
        _count("read", values, done, pool)
        return done

    def put(
        self, values: Sequence[ValueId], payloads: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        """Write each value that is not there yet, to live for `life_ms`; those that are, as long at least.

        True for each value that is stored, or will be: a write that failed is copied and retried. False
        when there is no room to remember it.
        """
        done = self._put("write", values, payloads, pool, life_ms)
        if all(done):
            return done
        kept = [
            ok or self._retries.offer(value, payload, pool, life_ms)
            for ok, value, payload, life_ms in zip(
                done, values, payloads, life.each(life_ms, len(values)), strict=True
            )
        ]
        self._wake.set()
        return kept

    def record(self, key: bytes, length: int) -> bytes | None:
        """What is under `key`, if it has that length, in bytes; it has no header and is not checked."""
        target = bytearray(length)
        found = False

        def work(connection: Connection) -> None:
            nonlocal found
            found = list(connection.read([key], [[memoryview(target)]])) == [Status.READ]

        self._call("bookkeeping", work)
        return bytes(target) if found else None

    def prolong(self, values: Sequence[ValueId], life_ms: Life) -> bool:
        """Let each value that exists live for `life_ms` at least; False after a fault."""
        return self._call("prolong", lambda c: life.prolong(c, values, life_ms))

    def shorten(self, values: Sequence[ValueId], life_ms: Life) -> int:
        """Let each value that exists live for `life_ms` at most; returns how many would have lived longer."""
        count = 0

        def work(connection: Connection) -> None:
            nonlocal count
            count = life.shorten(connection, values, life_ms)

        self._call("shorten", work)
        return count

    def integers(self, commands: Sequence[Sequence[bytes]]) -> list[int] | None:
        """The replies to commands that answer with an integer, in one round trip; None after a fault.

        The second word of each command is its key.
        """
        replies: list[int] | None = None

        def work(connection: Connection) -> None:
            nonlocal replies
            replies = connection.integers(commands)

        self._call("bookkeeping", work)
        return replies

    def clear(self, prefix: bytes) -> bool:
        """Remove every key that begins with `prefix`; False if the server failed on the way.

        Walks the whole server: an operator's command, not a request's.
        """
        self._retries.abandon()
        try:
            with redis.Redis.from_url(
                self._options.url, socket_timeout=_CLEAR_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
            ) as server:
                keys: list[bytes] = []
                for key in server.scan_iter(match=prefix + b"*", count=_CLEAR_KEYS):
                    keys.append(key)
                    if len(keys) == _CLEAR_KEYS:
                        server.unlink(*keys)
                        keys = []
                if keys:
                    server.unlink(*keys)
        except redis.RedisError as error:
            self.faults.count("clear", error)
            return False
        return True

    def close(self) -> None:
        """Write what waits for a retry, for as long as the options grant, and close all connections."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(self._options.drain_s + self._options.timeout_s + _TICK_S)
        if lost := self._retries.abandon():
            self.faults.count("unwritten", f"{lost} values could not be written before the end", lost)
        self._client.close()

    def _put(
        self, call: str, values: Sequence[ValueId], payloads: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        done = [False] * len(values)
        self._call(call, lambda c: transfer.write(c, values, payloads, done, life_ms, self.faults.count))
        _count("written", values, done, pool)
        return done

    def _call(self, call: str, work: Callable[[Connection], None]) -> bool:
        """Do `work` with a connection, if the breaker lets it; False if it did not come to its end.

        A fault ends it; what it did so far stands.
        """
        if not self._breaker.admits():
            self.faults.count("breaker_open", "the server is not asked until it answers a probe")
            return False
        limit_s = self._options.timeout_s * (1 if call in _BULK else _SHORT)
        started = time.perf_counter()
        try:
            with self._client.connection(Deadline(limit_s)) as connection:
                work(connection)
        except WireError as error:
            self._failed(error, out_of_time=time.perf_counter() - started >= _WHOLE * limit_s)
            return False
        else:
            self._breaker.succeeded()
            return True
        finally:
            metrics.SECONDS.labels(call).observe(time.perf_counter() - started)

    def _failed(self, error: WireError, *, out_of_time: bool = False) -> None:
        kind = transfer.refusal_kind(error) if isinstance(error, ServerRefused) else error.kind
        self.faults.count(kind, f"{self}: {error}")
        if isinstance(error, ServerRefused) and error.code in _HEALTHY:
            return
        self._breaker.failed(at_once=out_of_time)
        # What broke one connection has most likely broken those that idle.
        self._client.drop_idle()
        metrics.BREAKER.labels(str(self)).set(self._breaker.state)
        self._wake.set()

    def _upkeep(self) -> None:
        self._check_version()
        while not self._closing:
            idle = self._breaker.state is State.CLOSED and not len(self._retries)
            self._wake.wait(None if idle else _TICK_S)
            self._wake.clear()
            try:
                self._probe()
                while not self._closing and self._retry():
                    pass
            except Exception as error:  # this thread must outlive whatever happens in it
                self.faults.count("internal", error, trace=True)
        drained_by = time.monotonic() + self._options.drain_s
        with contextlib.suppress(Exception):
            while len(self._retries) and time.monotonic() < drained_by:
                self._probe()
                if not self._retry():
                    time.sleep(_TICK_S / 4)

    def _probe(self) -> None:
        if not self._breaker.admit_probe():
            return
        try:
            self._client.resolve()
            with self._client.connection(Deadline(self._options.timeout_s)) as connection:
                connection.ping()
        except WireError as error:
            self._failed(error)
        else:
            self._breaker.succeeded()
            self.faults.forget()
            metrics.BREAKER.labels(str(self)).set(self._breaker.state)
            self._check_version()

    def _check_version(self) -> None:
        """Say so if the server is too old for some commands; each of those is a miss."""
        version = None
        with (
            contextlib.suppress(Exception),  # a courtesy, which must not end this thread
            self._client.connection(Deadline(self._options.timeout_s)) as connection,
        ):
            version = connection.version()
        if version is not None and version < _OLDEST:
            found, needed = (".".join(map(str, numbers)) for numbers in (version, _OLDEST))
            self.faults.count("too_old", f"{self} is Redis {found}, and the store needs {needed} or later")

    def _retry(self) -> bool:
        """Write what waits longest; False if nothing is due, or it failed again."""
        write = self._retries.due() if self._breaker.admits() else None
        if write is None:
            return False
        payload = [memoryview(write.payload)]
        if self._put("retry", [write.value], [payload], write.pool, write.ttl_ms)[0]:
            self._retries.written()
            return True
        self._retries.failed()
        return False


def _count(direction: str, values: Sequence[ValueId], done: Sequence[bool], pool: str) -> None:
    count = sum(done)
    metrics.PAGES.labels(pool, direction, "ok").inc(count)
    metrics.PAGES.labels(pool, direction, "missed").inc(len(done) - count)
    moved = sum(value.length for value, ok in zip(values, done, strict=True) if ok)
    metrics.BYTES.labels(pool, direction).inc(moved)
