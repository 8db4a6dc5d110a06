"""Which sessions may have KV on the device: a place each, kept while their tools run.

The gateway's policy (`service.admission`, `service.admission_places`), for one tenant. A session whose turn
is due takes a place when its working set fits beside those of the others, which together may take `share` of
the device. It keeps the place through gaps. Where there is none, the turn waits in the order of arrival,
until one has been idle for longer than `hold_s`: that one gives its place up. So does the one that is idle
longest, and is evicted first, when others have outgrown the room. That a session has ended, nobody says.

With a store `hold_s` may be short, since the session comes back at the price of a restore. A turn that would
wait longer than its restore takes then runs without a place, as soon as it fits beside the turns that run:
beyond that, what was restored for one that waits in the engine is evicted again for the next.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model.capacity.budget import Budget
from model.simulation.events import Events
from model.simulation.node import SLOTS_RUNNING

# States that a session in place lives from: the last prompt's, its answer's, and the one before.
STATES_PER_SESSION = 3
# Weight of the newest in the mean time between free places, and in that of a restored token.
SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class Turn:
    """A turn of a session, `tokens` with its answer; `begin` is called when it is let in.

    `visits`: it has no place. `moved_in`: the session had been here, and had no place before.
    """

    session: int
    prompt_tokens: int
    tokens: int
    begin: Callable[[], None]
    visits: bool = False
    moved_in: bool = False
    begun_s: float = 0.0


@dataclass(slots=True)
class Admission:
    """Places by session; all counts in tokens, times in seconds. `store`: sessions can come back from one."""

    events: Events
    budget: Budget
    hold_s: float
    share: float = 0.95
    store: bool = False
    waited: int = 0
    _freed_s: float | None = None
    _interval_s: float = math.inf
    _restore_s_per_token: float = 0.0
    _check_s: float = math.inf
    _known: set[int] = field(default_factory=set[int])
    _placed: dict[int, int] = field(default_factory=dict[int, int])
    _running: dict[Turn, None] = field(default_factory=dict[Turn, None])
    _idle: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    _waiting: dict[Turn, None] = field(default_factory=dict[Turn, None])

    @property
    def _limit_tokens(self) -> float:
        return self.share * self.budget.kv_tokens

    def ask(self, turn: Turn) -> None:
        """Begin the turn now, or when there is room for it."""
        if (turn.session in self._placed or not self._waiting) and self._grant(turn):
            return
        self.waited += 1
        self._waiting[turn] = None
        self._serve()

    def rest(self, turn: Turn, first_token_s: float) -> None:
        """The turn has ended, its first token came at `first_token_s`; the session's tool runs now."""
        if turn.moved_in:
            measured = (first_token_s - turn.begun_s) / turn.prompt_tokens
            self._restore_s_per_token += SMOOTHING * (measured - self._restore_s_per_token)
        self._known.add(turn.session)
        del self._running[turn]
        if not turn.visits and all(other.session != turn.session for other in self._running):
            self._idle[turn.session] = self.events.now_s
        self._serve()

    def _grant(self, turn: Turn) -> bool:
        turn.moved_in = turn.session not in self._placed and turn.session in self._known
        if turn.session in self._placed or self._make_place(turn.tokens):
            self._placed[turn.session] = max(turn.tokens, self._placed.get(turn.session, 0))
            self._idle.pop(turn.session, None)
            self._take_back()
        elif self.store and self._restores(turn) and self._fits_running(turn.tokens):
            turn.visits = True
        else:
            return False
        turn.begun_s = self.events.now_s
        self._running[turn] = None
        turn.begin()
        return True

    def _restores(self, turn: Turn) -> bool:
        """Whether bringing the session back is estimated to take less time than the next place does."""
        place_s = min(self._interval_s, next(self._free_s(), math.inf) - self.events.now_s)
        if math.isinf(place_s):
            place_s = self.hold_s
        return self._restore_s_per_token * turn.prompt_tokens < max(0.0, place_s)

    def _fits_running(self, tokens: int) -> bool:
        """Whether a turn fits beside those that run; one alone always does."""
        taken = sum(turn.tokens for turn in self._running)
        return not self._running or (
            taken + tokens <= self._limit_tokens and len(self._running) < self.budget.running_requests
        )

    def _fits(self, tokens: int) -> bool:
        running = min(self.budget.running_requests, len(self._running) + 1)
        places = max(1, (self.budget.state_slots - SLOTS_RUNNING * running) // STATES_PER_SESSION)
        return len(self._placed) < places and sum(self._placed.values()) + tokens <= self._limit_tokens

    def _make_place(self, tokens: int) -> bool:
        """Take places back until the tokens fit; one session alone always does."""
        while self._placed and not self._fits(tokens):
            if next(self._free_s(), math.inf) > self.events.now_s:
                return False
            self._remove_idle()
        return True

    def _take_back(self) -> None:
        """Where sessions have outgrown the room, the one that is idle longest gives its place up."""
        while self._idle and sum(self._placed.values()) > self._limit_tokens:
            self._remove_idle()

    def _remove_idle(self) -> None:
        session, _ = self._idle.popitem(last=False)
        del self._placed[session]
        now_s = self.events.now_s
        if self._freed_s is not None:
            interval_s = now_s - self._freed_s
            if math.isinf(self._interval_s):
                self._interval_s = interval_s
            self._interval_s += SMOOTHING * (interval_s - self._interval_s)
        self._freed_s = now_s

    def _free_s(self) -> Iterator[float]:
        """When the next places can be taken back, the soonest first."""
        return (since_s + self.hold_s for since_s in self._idle.values())

    def _serve(self) -> None:
        while self._waiting:
            first = next(iter(self._waiting))
            # Out of the queue before it begins, which may ask for the next turn at once.
            del self._waiting[first]
            if not self._grant(first):
                self._waiting = {first: None, **self._waiting}
                break
            for other in [turn for turn in self._waiting if turn.session in self._placed]:
                del self._waiting[other]
                self._grant(other)
        due_s = next(self._free_s(), math.inf)
        if self._waiting and due_s < self._check_s:
            self._check_s = due_s
            # Later than the moment itself by more than what a sum of floats is off.
            self.events.at(max(due_s, self.events.now_s) + 1e-6, self._check)

    def _check(self) -> None:
        """Look again, when the session that was idle longest has been so for long enough."""
        self._check_s = math.inf
        self._serve()
