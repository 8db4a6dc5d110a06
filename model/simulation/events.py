"""A clock and what is to happen when."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class Events:
    """Actions in the order of their times; those of one time in the order in which they were planned."""

    now_s: float = 0.0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list[tuple[float, int, Callable[[], None]]]
    )
    _numbers: "count[int]" = field(default_factory=count)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Plan an action; one of the past happens next."""
        heapq.heappush(self._queue, (max(time_s, self.now_s), next(self._numbers), action))

    def run(self, finished: Callable[[], bool]) -> None:
        """Let things happen until `finished`, or nothing is left."""
        while self._queue and not finished():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
