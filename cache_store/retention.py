"""What stays in the store and for how long: numbers alone, no I/O.

Two rules. *States* are large (449 MB each at full size, as much as 16,253 tokens of KV), and all but a few of
a chain are superseded by newer ones (`StatePolicy`). *Pages* live by the class of their chain, and a page
never outlives one before it (`Lifetimes`): a chain that misses a page is lost from there on.

Positions on a chain are numbers of pages from its root: a state at position 5 covers the first 5 pages.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, TypeVar

TtlClass = Literal["5m", "1h", "24h"]
TTL_MS: dict[TtlClass, int] = {"5m": 300_000, "1h": 3_600_000, "24h": 86_400_000}
# 2**20 tokens in pages of 64: the longest context.
_MAX_DEPTH = 16_384
# Dates are multiples of a twelfth of the class: so often does a chain in use have to be prolonged as a whole.
_STEPS = 12

K = TypeVar("K")
V = TypeVar("V")


class Reason(StrEnum):
    """Why a state stays."""

    TAIL = "tail"
    """the deepest of its chain, where the session continues"""
    PRECEDING = "preceding"
    """the one before, where a turn is tried again"""
    FORK = "fork"
    """the deepest before a page after which chains part, where branches continue"""
    SPACED = "spaced"
    """one every so many tokens, where an edited history continues"""


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain as far as its newest state, as found in the store.

    Attributes:
        states: positions of its states, ascending; the last one is the newest.
        forks: positions after which more than one page is known to follow.
    """

    states: Sequence[int]
    forks: Collection[int] = frozenset()

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.states, self.states[1:], strict=False))
        assert self.states and self.states[0] > 0 and ascending, f"positions {self.states} do not ascend"


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Which states of a chain stay when a newer one has been stored.

    Attributes:
        keep_every_tokens: tokens from one state that stays for good to the next.
        page_tokens: tokens a page.
    """

    keep_every_tokens: int
    page_tokens: int

    def __post_init__(self) -> None:
        assert self.keep_every_tokens > 0 and self.page_tokens > 0, self

    def kept(self, chain: Chain) -> dict[int, Reason]:
        """The states that stay, by position; all others of the chain are superseded.

        What stayed once and is not among the last two stays when the chain grows.
        """
        kept: dict[int, Reason] = {}
        spaced = 0
        for position in chain.states:
            if (position - spaced) * self.page_tokens >= self.keep_every_tokens:
                kept[position] = Reason.SPACED
                spaced = position
        for position, following in zip(chain.states, chain.states[1:], strict=False):
            if any(position <= fork < following for fork in chain.forks):
                kept[position] = Reason.FORK
        for position in chain.states[-2:-1]:
            kept.setdefault(position, Reason.PRECEDING)
        kept[chain.states[-1]] = Reason.TAIL
        return kept

    def superseded(self, chain: Chain) -> list[int]:
        """The positions of the states that are to expire soon."""
        kept = self.kept(chain)
        return [position for position in chain.states if position not in kept]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """When pages of a class expire.

    The date moves in steps, so that pages written at different times within one step expire together, and by
    depth within the step: the deeper, the earlier. With every page before it prolonged to the same step, no
    page outlives a shallower one.
    """

    ttl_ms: int

    def __post_init__(self) -> None:
        assert self.ttl_ms >= _STEPS, f"a time to live of {self.ttl_ms} ms"

    @property
    def step_ms(self) -> int:
        """Time from one date to the next."""
        return self.ttl_ms // _STEPS

    def date_ms(self, now_ms: int) -> int:
        """The date of what is used now: after at least the class's time, and at most a step more."""
        return ((now_ms + self.ttl_ms) // self.step_ms + 1) * self.step_ms

    def life_ms(self, now_ms: int, position: int) -> int:
        """What the page (or state) at `position` (1 the first) of a chain that is used now has to live.

        At least the class's time, at most two steps more.
        """
        assert position > 0, f"position {position}"
        shallowness = _MAX_DEPTH - min(position, _MAX_DEPTH)
        return self.date_ms(now_ms) + self.step_ms * shallowness // _MAX_DEPTH - now_ms


class Recent(Generic[K, V]):
    """A mapping that forgets what was not asked for or set for longest. Thread-safe."""

    def __init__(self, size: int) -> None:
        assert size > 0, f"room for {size}"
        self._size = size
        self._lock = threading.Lock()
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        with self._lock:
            value = self._items.get(key)
            if value is not None:
                self._items.move_to_end(key)
            return value

    def set(self, key: K, value: V) -> None:
        """Remember `value`."""
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            if len(self._items) > self._size:
                self._items.popitem(last=False)
