"""Which sessions may have KV on one engine's device: a place each, kept while their tools run.

A session's working set is what its largest recent turn had, prompt and answer, and at least the sum of those
that run now (sub-agents beside their parent), without what others had before it. Together they may fill a
share of the device's KV, and have as many states as there are.

Counts are in tokens, times in seconds of the caller's clock. Nothing here waits.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

STATES_RUNNING: Final = 3
"""Of a running request: the one that is worked on and two that are tracked (SGLang's `extra_buffer`)."""
STATES_RESTING: Final = 3
"""That a session in its place lives from: the last prompt's, its answer's, and the one before."""

Reason = Literal["idle", "outgrown"]


@dataclass(frozen=True, slots=True)
class Room:
    """What one engine's device holds; None where there is no such limit, or none is known."""

    kv_tokens: int
    state_slots: int | None = None
    running_requests: int | None = None

    def __post_init__(self) -> None:
        assert self.kv_tokens > 0, self

    def places(self, active: int) -> int | None:
        """How many sessions have their states there while `active` turns run; None for any number."""
        if self.state_slots is None:
            return None
        running = min(active, self.running_requests or active)
        return max(1, (self.state_slots - STATES_RUNNING * running) // STATES_RESTING)


@dataclass(slots=True)
class Place:
    """A session's place. `turns` are the sizes of those that run, `recent` of those that ended, with when."""

    tenant: str
    turns: list[int] = field(default_factory=list[int])
    recent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    @property
    def tokens(self) -> int:
        """The working set."""
        return max(sum(self.turns), max((tokens for _, tokens in self.recent), default=0))

    def ended(self, asked: int, tokens: int, now_s: float, keep_s: float) -> None:
        """A turn that was counted as `asked` tokens has ended with `tokens`."""
        self.turns.remove(asked)
        self.recent.append((now_s, tokens))
        # A session may shrink: its client compacts the history.
        while self.recent[0][0] < now_s - keep_s and len(self.recent) > 1:
            self.recent.popleft()


class Places:
    """The places of one engine."""

    def __init__(
        self,
        room: Room,
        *,
        hold_s: float,
        share: float,
        clock: Callable[[], float],
        taken_back: Callable[[Reason], None] = lambda _: None,
    ) -> None:
        """`hold_s`: how long an idle session keeps its place when others want it.

        `share`: of the KV that places may take together. `taken_back` is told of each place that was.
        """
        self.room = room
        self.hold_s = hold_s
        self._share = share
        self._clock = clock
        self._taken_back = taken_back
        self._placed: dict[str, Place] = {}
        self._idle: dict[str, float] = {}
        """Sessions without a running turn, by when that ended; the longest idle first."""
        self._active = 0
        self._visits: list[tuple[str, int]] = []
        """Turns without a place: tenant and tokens."""

    def __len__(self) -> int:
        return len(self._placed)

    def __contains__(self, session: str) -> bool:
        return session in self._placed

    @property
    def tokens(self) -> int:
        """Of all places."""
        return sum(place.tokens for place in self._placed.values())

    @property
    def limit_tokens(self) -> int:
        """What places may have together."""
        return int(self._share * self.room.kv_tokens)

    def held(self, tenant: str) -> int:
        """Tokens of a tenant's places, and of its turns without one."""
        visiting = sum(tokens for visitor, tokens in self._visits if visitor == tenant)
        return visiting + sum(place.tokens for place in self._placed.values() if place.tenant == tenant)

    def enter(self, session: str, tenant: str, tokens: int) -> bool:
        """Begin a turn of a session that has a place, or for which there is one; whether there is."""
        if session not in self._placed:
            if not self._make_room(tokens):
                return False
            self._placed[session] = Place(tenant)
        self._idle.pop(session, None)
        self._placed[session].turns.append(tokens)
        self._active += 1
        self._take_back()
        return True

    def rest(self, session: str, asked: int, tokens: int) -> None:
        """End a turn that `enter` was told to have `asked` tokens, and that had `tokens`."""
        place = self._placed[session]
        now_s = self._clock()
        place.ended(asked, tokens, now_s, self.hold_s)
        self._active -= 1
        if not place.turns:
            self._idle[session] = now_s
        self._take_back()

    def visit(self, tenant: str, tokens: int) -> bool:
        """Begin a turn without a place, if all turns that run then fit the room; whether it has begun.

        What is idle gives way to it. Beyond that, turns would wait within the engine, where what was
        restored for one is evicted again for the next before it has run.
        """
        running = sum(sum(place.turns) for place in self._placed.values())
        running += sum(tokens for _, tokens in self._visits)
        most = self.room.running_requests
        if self._active and (running + tokens > self.limit_tokens or (most and self._active >= most)):
            return False
        self._visits.append((tenant, tokens))
        self._active += 1
        return True

    def part(self, tenant: str, tokens: int) -> None:
        """End a turn that `visit` was told of."""
        self._visits.remove((tenant, tokens))
        self._active -= 1

    def undo(self, session: str, asked: int) -> None:
        """Take back an `enter` that came to nothing."""
        place = self._placed[session]
        place.turns.remove(asked)
        self._active -= 1
        if not place.turns and not place.recent:
            del self._placed[session]
        elif not place.turns:
            self._idle[session] = self._clock()

    def free_s(self) -> Iterator[float]:
        """When the next places can be taken back from idle sessions, the soonest first."""
        return (since_s + self.hold_s for since_s in self._idle.values())

    def _fits(self, tokens: int) -> bool:
        places = self.room.places(self._active + 1)
        return (places is None or len(self._placed) < places) and self.tokens + tokens <= self.limit_tokens

    def _make_room(self, tokens: int) -> bool:
        """Take places back until the tokens fit; one session alone always does."""
        while self._placed and not self._fits(tokens):
            session, since_s = next(iter(self._idle.items()), ("", self._clock()))
            if not session or self._clock() < since_s + self.hold_s:
                return False
            self._remove(session, "idle")
        return True

    def _take_back(self) -> None:
        """Where sessions have outgrown the room, let those go that the engine evicts first."""
        while self._idle and self.tokens > self.limit_tokens:
            self._remove(next(iter(self._idle)), "outgrown")

    def _remove(self, session: str, reason: Reason) -> None:
        del self._idle[session], self._placed[session]
        self._taken_back(reason)
