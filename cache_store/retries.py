"""Failed writes that wait for another try: a bounded queue, oldest first."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cache_store import metrics
from cache_store.format import Segments, ValueId

_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Write:
    """One value to be written again: the engine's own memory may have been reused by then."""

    value: ValueId
    payload: bytes
    pool: str
    ttl_ms: int


class RetryQueue:
    """Writes waiting for a server that takes them, in the order in which they failed. Thread-safe.

    A page that is lost hides every deeper page of its session, and SGLang never writes one again: so a
    failed write is kept. Order is kept too, since the shallow pages are the ones that count. What would
    exceed `max_bytes` is refused.
    """

    def __init__(
        self, *, max_bytes: int, max_attempts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._max_attempts = max_attempts
        self._clock = clock
        self._lock = threading.Lock()
        self._writes: deque[Write] = deque()
        self._bytes = 0
        self._attempts = 0  # of the oldest
        self._due_at = 0.0

    def __len__(self) -> int:
        return len(self._writes)

    def offer(self, value: ValueId, payload: Segments, pool: str, ttl_ms: int) -> bool:
        """Take a copy of a write that failed; False when the queue has no room for it."""
        with self._lock:
            if self._bytes + value.length > self._max_bytes:
                metrics.RETRIES.labels("refused").inc()
                return False
            self._writes.append(Write(value, b"".join(payload), pool, ttl_ms))
            self._count(value.length)
        metrics.RETRIES.labels("queued").inc()
        return True

    def due(self) -> Write | None:
        """The oldest write, if its time has come. Report its outcome before asking again."""
        with self._lock:
            return self._writes[0] if self._writes and self._clock() >= self._due_at else None

    def written(self) -> None:
        """The oldest write succeeded."""
        self._drop("written")

    def failed(self) -> None:
        """The oldest write failed again: it waits, longer each time, or is given up."""
        with self._lock:
            self._attempts += 1
            self._due_at = self._clock() + min(_FIRST_WAIT_S * 2 ** (self._attempts - 1), _MAX_WAIT_S)
            given_up = self._attempts >= self._max_attempts
        if given_up:
            self._drop("given_up")

    def abandon(self) -> int:
        """Drop everything; returns how many writes that were."""
        with self._lock:
            count = len(self._writes)
            self._writes.clear()
            self._count(-self._bytes)
        metrics.RETRIES.labels("abandoned").inc(count)
        return count

    def _drop(self, outcome: str) -> None:
        with self._lock:
            self._count(-self._writes.popleft().value.length)
            self._attempts = 0
            if outcome == "written":
                self._due_at = 0.0
        metrics.RETRIES.labels(outcome).inc()

    def _count(self, change: int) -> None:
        self._bytes += change
        metrics.QUEUE_BYTES.inc(change)  # each server has a queue of its own
