"""Which sessions may have KV on the device: a place each, kept while their tools run.

The gateway's policy (`service.admission`), for one tenant. A session whose turn is due takes a place when its
working set fits beside those of the others, which together may take `share` of the device. It keeps the place
through gaps. Where there is none, the turn waits in the order of arrival, until one has been idle for longer
than `hold_s`: that one gives its place up. So does the one that is idle longest, and is evicted first, when
others have outgrown the room. That a session has ended, nobody says. With a store `hold_s` may be short,
since the session comes back at the price of a restore, and a turn that would wait longer than its restore
takes runs at once without a place.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from model.capacity.budget import Budget
from model.simulation.events import Events
from model.simulation.node import SLOTS_RUNNING

# States that a session in place lives from: the last prompt's, its answer's, and the one before.
STATES_PER_SESSION = 3
# Weight of the newest interval in the mean time between free places.
SMOOTHING = 0.1


@dataclass(slots=True)
class Admission:
    """Places by session; all counts in tokens."""

    events: Events
    budget: Budget
    hold_s: float
    share: float = 0.95
    waited: int = 0
    _freed_s: float = 0.0
    _interval_s: float = 0.0
    _placed: dict[int, int] = field(default_factory=dict[int, int])
    _active: dict[int, int] = field(default_factory=dict[int, int])
    _idle: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    _waiting: deque[tuple[int, int, Callable[[], None]]] = field(
        default_factory=deque[tuple[int, int, Callable[[], None]]]
    )

    @property
    def _places(self) -> int:
        slots = self.budget.state_slots - SLOTS_RUNNING * min(
            self.budget.running_requests, len(self._active) + 1
        )
        return max(1, slots // STATES_PER_SESSION)

    def ask(
        self, session: int, tokens: int, admitted: Callable[[], None], restore_s: float = math.inf
    ) -> None:
        """Call `admitted` when the session may use a working set of `tokens`.

        `restore_s` is how long it would take to run it without a place, from the store.
        """
        if session in self._placed or (not self._waiting and self._make_place(tokens)):
            self._admit(session, tokens, admitted)
            self._take_back()
        elif restore_s < self._interval_s * (len(self._waiting) + 1):
            self._active[session] = self._active.get(session, 0) + 1
            admitted()
        else:
            self.waited += 1
            self._waiting.append((session, tokens, admitted))
            self._check_later()

    def rest(self, session: int) -> None:
        """One turn of the session has ended; its tool runs now."""
        self._active[session] -= 1
        if not self._active[session]:
            del self._active[session]
            if session in self._placed:
                self._idle[session] = self.events.now_s
        self._serve()

    def _count_freed(self) -> None:
        """Follow how long it takes until the next place is free."""
        now_s = self.events.now_s
        self._interval_s += SMOOTHING * (now_s - self._freed_s - self._interval_s)
        self._freed_s = now_s

    def _admit(self, session: int, tokens: int, admitted: Callable[[], None]) -> None:
        self._placed[session] = max(tokens, self._placed.get(session, 0))
        self._active[session] = self._active.get(session, 0) + 1
        self._idle.pop(session, None)
        admitted()

    def _fits(self, tokens: int) -> bool:
        room = self.share * self.budget.kv_tokens
        return len(self._placed) < self._places and sum(self._placed.values()) + tokens <= room

    def _make_place(self, tokens: int) -> bool:
        while not self._fits(tokens):
            session, since_s = next(iter(self._idle.items()), (0, self.events.now_s))
            if self.events.now_s - since_s < self.hold_s or not self._idle:
                return not self._placed  # one alone always runs
            del self._idle[session], self._placed[session]
            self._count_freed()
        return True

    def _take_back(self) -> None:
        """Where sessions have outgrown the room, the one that is idle longest gives its place up."""
        while self._idle and sum(self._placed.values()) > self.share * self.budget.kv_tokens:
            session, _ = self._idle.popitem(last=False)
            del self._placed[session]
            self._count_freed()

    def _serve(self) -> None:
        while self._waiting:
            session, tokens, admitted = self._waiting[0]
            if session not in self._placed and not self._make_place(tokens):
                self._check_later()
                return
            self._waiting.popleft()
            self._admit(session, tokens, admitted)

    def _check_later(self) -> None:
        """Look again when the session that is idle longest has been so for long enough."""
        if self._idle:
            since_s = next(iter(self._idle.values()))
            self.events.at(since_s + self.hold_s + 1e-6, self._serve)
