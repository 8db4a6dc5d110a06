"""Work that no request waits for: done soon, on a thread of its own, and dropped without harm."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store import metrics

_MAX_TASKS = 4096
_TICK_S = 0.5


@dataclass(frozen=True, slots=True, order=True)
class _Task:
    due_at: float
    number: int
    work: Callable[[], bool] = field(compare=False)
    waits_s: Sequence[float] = field(compare=False)


class Backlog:
    """Tasks in the order in which they are due. Thread-safe; close it in the end.

    A task returns False when it is to be tried again, and nothing is lost with it but the bytes that it would
    have saved: what exceeds 4096 tasks, or is left at the end, is dropped.
    """

    def __init__(
        self, report: Callable[[Exception], None], *, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """`report` takes what a task raises; `timer` gives seconds."""
        self._report = report
        self._timer = timer
        self._tasks: list[_Task] = []  # a heap
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="longhaul-retention", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, work: Callable[[], bool], waits_s: Sequence[float]) -> None:
        """Do `work` after the first of `waits_s`; while it returns False, again after each of the others."""
        with self._lock:
            if len(self._tasks) < _MAX_TASKS and not self._closing:
                task = _Task(self._timer() + waits_s[0], next(self._numbers), work, waits_s[1:])
                heapq.heappush(self._tasks, task)
                metrics.CHAINS.inc()
        self._wake.set()

    def work(self) -> bool:
        """Do what is due first; False if nothing is."""
        with self._one_at_a_time:
            with self._lock:
                if not self._tasks or self._tasks[0].due_at > self._timer():
                    return False
                task = heapq.heappop(self._tasks)
                metrics.CHAINS.dec()
            if not task.work() and task.waits_s:
                self.add(task.work, task.waits_s)
            return True

    def close(self, timeout_s: float) -> None:
        """Drop what is left, and wait for what is under way."""
        with self._lock:
            self._closing = True
            metrics.CHAINS.dec(len(self._tasks))
            self._tasks.clear()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_TICK_S if self._tasks else None)
            self._wake.clear()
            try:
                while not self._closing and self.work():
                    pass
            except Exception as error:  # this thread must outlive whatever happens in it
                self._report(error)
