"""Starts services in order, waits until each is ready, restarts what dies, and stops all in reverse order."""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from cache_store.process import adopt_orphans
from service.processes import Guardian, Service

_POLL_S = 0.2
_TAIL_LINES = 15
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SupervisionError(RuntimeError):
    """A service can't be started or kept running; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a service that dies is started again.

    The pause doubles from `first_delay_s` to `max_delay_s`; after `limit` deaths within `window_s` the
    supervisor gives up.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    limit: int = 5
    window_s: float = 600.0

    def __post_init__(self) -> None:
        assert 0 <= self.first_delay_s <= self.max_delay_s and self.limit >= 0 and self.window_s > 0

    def delay_s(self, deaths: int) -> float:
        """Pause before the start that follows the `deaths`-th death (1 is the first)."""
        return min(self.first_delay_s * 2.0 ** (deaths - 1), self.max_delay_s)


class Observer(Protocol):
    """Who is told what happens."""

    def starting(self, service: Service) -> None:
        """The service was launched."""
        ...

    def waiting(self, service: Service, elapsed_s: float) -> None:
        """It isn't ready yet; called several times a second."""
        ...

    def ready(self, service: Service, elapsed_s: float) -> None:
        """It does its work."""
        ...

    def died(self, service: Service, status: int, delay_s: float, deaths: int, limit: int) -> None:
        """It ended by itself and will be started again after `delay_s`."""
        ...

    def stopping(self, service: Service) -> None:
        """It is being stopped."""
        ...


@dataclass(slots=True)
class Supervised:
    """One service with its limits and what happened to it."""

    service: Service
    start_timeout_s: float
    orphan_grace_s: float = 0.0
    deaths: list[float] = field(default_factory=list[float])
    due: float | None = None
    launched: float = 0.0
    is_up: bool = False


def describe(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"ended with status {status}"


def tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, indented; says so when there is none."""
    try:
        found = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        found = []
    return "\n".join(f"  {line}" for line in found) or "  (empty)"


class Supervisor:
    """Runs services until it is told to stop.

    Only the main thread may use it: signals are handled there, and children end with the thread that started
    them.
    """

    def __init__(self, observer: Observer, policy: RestartPolicy | None = None) -> None:
        self._observer = observer
        self._policy = policy or RestartPolicy()
        self._running: list[Supervised] = []
        self._is_stopping = False
        self._guardian = Guardian()
        adopt_orphans()

    @contextmanager
    def signals(self) -> Generator[None]:
        """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; one more ends all at once."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            if self._is_stopping:
                self._guardian.fire()
            else:
                self._is_stopping = True
                raise KeyboardInterrupt

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, entry: Supervised) -> None:
        """Launch a service and wait until it is ready; raises `SupervisionError`."""
        self._running.append(entry)
        self._launch(entry)
        service = entry.service
        while not service.is_ready():
            elapsed = time.monotonic() - entry.launched
            status = service.poll()
            if status is not None:
                raise SupervisionError(
                    f"{service.name} {describe(status)}; the end of {service.log}:\n{tail(service.log)}"
                )
            if elapsed > entry.start_timeout_s:
                raise SupervisionError(
                    f"{service.name} is not ready after {elapsed:.0f} s; the end of {service.log}:\n"
                    f"{tail(service.log)}"
                )
            self._observer.waiting(service, elapsed)
            time.sleep(_POLL_S)
        self._mark_ready(entry)

    def watch(self, each: Callable[[], None] = lambda: None) -> None:
        """Restart what dies, until a signal raises KeyboardInterrupt.

        `each` is called several times a second. Raises `SupervisionError` when a service dies too often.
        """
        while True:
            for entry in self._running:
                self._tend(entry)
            each()
            time.sleep(_POLL_S)

    def finish(self, entry: Supervised) -> None:
        """Stop one service and forget it."""
        self._end(entry)
        self._running.remove(entry)

    def stop(self) -> None:
        """Stop all services, the last started first, and the guardian."""
        self._is_stopping = True
        for entry in reversed(self._running):
            self._observer.stopping(entry.service)
            self._end(entry)
        self._running.clear()
        self._guardian.fire()

    def _launch(self, entry: Supervised) -> None:
        entry.due, entry.is_up, entry.launched = None, False, time.monotonic()
        try:
            entry.service.launch()
        except (OSError, RuntimeError) as error:
            raise SupervisionError(f"{entry.service.name} does not start: {error}") from error
        pid = entry.service.pid
        assert pid is not None
        self._guardian.watch(pid, entry.orphan_grace_s)
        self._observer.starting(entry.service)

    def _end(self, entry: Supervised) -> None:
        pid = entry.service.pid
        entry.service.stop()
        if pid is not None:
            self._guardian.release(pid)

    def _mark_ready(self, entry: Supervised) -> None:
        entry.is_up = True
        self._observer.ready(entry.service, time.monotonic() - entry.launched)

    def _tend(self, entry: Supervised) -> None:
        """One look at one service: restart it when its time has come, note its death or that it is ready."""
        now = time.monotonic()
        if entry.due is not None:
            if now >= entry.due:
                self._launch(entry)
            return
        status = entry.service.poll()
        if status is None and not entry.is_up:
            if entry.service.is_ready():
                self._mark_ready(entry)
            elif now - entry.launched > entry.start_timeout_s:
                status = -signal.SIGKILL  # what it gets below
        if status is None:
            return
        # What it had started goes too, or the next one would find its ports and memory taken.
        self._end(entry)
        self._schedule(entry, status, now)

    def _schedule(self, entry: Supervised, status: int, now: float) -> None:
        policy = self._policy
        entry.deaths = [death for death in entry.deaths if now - death < policy.window_s] + [now]
        deaths = len(entry.deaths)
        service = entry.service
        if deaths > policy.limit:
            raise SupervisionError(
                f"{service.name} {describe(status)}, {deaths} times within {policy.window_s:.0f} s; "
                f"the end of {service.log}:\n{tail(service.log)}"
            )
        delay = policy.delay_s(deaths)
        entry.due = now + delay
        self._observer.died(service, status, delay, deaths, policy.limit)
