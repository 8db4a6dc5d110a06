"""A circuit breaker: a dead server is not asked again by a request.

It opens after enough failures in a row, or after one that took all the time that a call may take: SGLang
looks up one request after the other, so each further wait would add to those of all that queue behind it.
"""

import threading
import time
from collections.abc import Callable
from enum import IntEnum


class State(IntEnum):
    """Of a breaker; the value is what the metric shows."""

    CLOSED = 0
    """calls go through"""
    HALF_OPEN = 1
    """one probe is under way, calls are refused"""
    OPEN = 2
    """calls are refused"""


class Breaker:
    """Counts failures in a row, refuses calls after `threshold` of them, closes after a good probe.

    Calls that serve a request never are the probe: whoever owns the breaker probes from a thread of its own
    (`admit_probe`), so that no request pays for finding out that the server is still dead. Each failed probe
    doubles the wait until the next one, up to `max_cooldown_s`. Thread-safe.
    """

    def __init__(
        self,
        *,
        threshold: int = 3,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threshold < 1:
            raise ValueError(f"breaker threshold is {threshold}: at least 1")
        if not 0 < cooldown_s <= max_cooldown_s:
            raise ValueError(f"breaker cooldown of {cooldown_s} s: more than 0, at most {max_cooldown_s}")
        self._threshold = threshold
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._failures = 0
        self._cooldown_s = cooldown_s
        self._probe_at = 0.0

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def admits(self) -> bool:
        """Whether a call may go to the server now."""
        return self._state is State.CLOSED

    def admit_probe(self) -> bool:
        """Whether to probe now. True at most once per cooldown; its outcome must be reported."""
        with self._lock:
            if self._state is not State.OPEN or self._clock() < self._probe_at:
                return False
            self._state = State.HALF_OPEN
            return True

    def succeeded(self) -> None:
        """Report a call or a probe that the server answered."""
        with self._lock:
            # A call that began before the breaker opened says nothing about the server now.
            if self._state is not State.OPEN:
                self._state = State.CLOSED
                self._failures = 0
                self._cooldown_s = self._first_cooldown_s

    def failed(self, *, at_once: bool = False) -> None:
        """Report a call or a probe that failed; with `at_once` it is enough to open the breaker."""
        with self._lock:
            if self._state is State.HALF_OPEN:
                self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
                self._open()
                return
            self._failures += 1
            if self._state is State.CLOSED and (at_once or self._failures >= self._threshold):
                self._open()

    def _open(self) -> None:
        self._state = State.OPEN
        self._probe_at = self._clock() + self._cooldown_s
