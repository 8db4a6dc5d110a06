"""Session-aware admission: live sessions that an engine can't hold wait, instead of evicting each other.

Beyond what fits, an LRU cache serves sessions that come in turns nothing at all, and the recomputation makes
a queue in which every session idles longer than its cache lives. So a session has a place
(`service.admission_places`), which it keeps while its tool runs. A turn of a session with a place begins at
once. Any other waits for one, in a fair queue and for a bounded time; unless there is a store, and bringing
the session back from there is estimated to take less time than the wait for a place: then it begins without
one, as soon as it fits beside the turns that run. Idle sessions give way to it, and come back in the same
way. So turns wait here instead of in the engine's own queue, where SGLang fetches the prefixes of all that
wait at once, and evicts those of the first for those of the last before they have run.

Both estimates are measured: how often places have become free, and how long the turns of late took to their
first token for each token of their prompts, queueing in the engine included. So a store whose pipe is full,
or an engine that is, makes turns wait here.

Each gateway counts for itself: with several before one engine, each gets its part of the share.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from service.admission_metrics import AdmissionMetrics
from service.admission_places import Places, Reason, Room
from service.admission_queue import FairQueue
from service.errors import EngineFailed, NoPlace
from service.generation import Chunk

HOLD_S: Final = 120.0
"""How long an idle session keeps its place from others without a store: what it loses is computed again.

That a session has ended, nobody says. 90 % of the gaps of recorded sessions are shorter.
"""
HOLD_WITH_STORE_S: Final = 10.0
"""The same with one: it comes back at the price of a restore. The median gap of recorded sessions is 10 s."""
WAIT_S: Final = 120.0
SHARE: Final = 0.95
_SMOOTHING: Final = 0.1
_OUTPUT_TOKENS: Final = 256
"""What a turn is taken to add to its prompt while it runs, where its own limit isn't smaller."""
_RETRY_S: Final = (1, 60)
_KNOWN_SESSIONS: Final = 65_536
_TICK_S: Final = 0.001
"""An event loop's timers may be early by its clock's resolution."""


def priority_of(service_tier: object) -> int:
    """What OpenAI's `service_tier` says: `priority` before all others, `flex` behind them."""
    return {"priority": 1, "flex": -1}.get(service_tier, 0) if isinstance(service_tier, str) else 0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Of all engines of a gateway.

    wait_s: the longest wait for a place. hold_s: how long an idle session keeps its own when others wait.
    share: of an engine's KV that this gateway's sessions may fill. store: sessions can come back from one.
    """

    wait_s: float = WAIT_S
    hold_s: float = HOLD_S
    share: float = SHARE
    store: bool = False

    def __post_init__(self) -> None:
        if self.wait_s < 0 or self.hold_s < 0:
            raise ValueError("--admission-wait-s, --admission-hold-s: must not be negative")
        if not 0 < self.share <= 1:
            raise ValueError(f"--admission-share {self.share}: must be over 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Demand:
    """A turn that asks for a place, at `asked_s` of the event loop's clock.

    continued: it goes on from a turn of the ledger, so its session is not a new one.
    """

    rid: str
    tenant: str
    session: str
    prompt_tokens: int
    output_tokens: int
    priority: int
    continued: bool = False
    asked_s: float = field(default_factory=_now_s)


@dataclass(slots=True, eq=False)
class _Waiting:
    demand: Demand
    admitted: "asyncio.Future[Stay]"


class Stay:
    """A turn that was let in, and what came of it. `places` are the engine's; None where it has no such.

    tokens: what it was counted as. visits: it has no place. moved_in: the session had been here, and had no
    place before.
    """

    def __init__(
        self,
        places: Places | None = None,
        tokens: int = 0,
        *,
        visits: bool = False,
        moved_in: bool = False,
    ) -> None:
        self.places = places
        self.tokens = tokens
        self.visits = visits
        self.moved_in = moved_in
        self.cached_tokens = 0
        self.output_tokens = 0
        self.first_s: float | None = None
        self._begun_s = _now_s()

    def saw(self, chunk: Chunk) -> None:
        """Count a chunk of the answer."""
        if self.first_s is None:
            self.first_s = _now_s() - self._begun_s
            self.cached_tokens = (
                chunk.cached_device_tokens + chunk.cached_host_tokens + chunk.cached_storage_tokens
            )
        self.output_tokens += len(chunk.ids)


class Admission:
    """Admission to one engine. Used by one event loop, whose clock all times are on."""

    def __init__(self, engine: str, settings: AdmissionSettings, metrics: AdmissionMetrics) -> None:
        """`engine` is its name in the metrics."""
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._places: Places | None = None
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._known: OrderedDict[str, int] = OrderedDict()
        """Sessions that were here, and how many of their tokens others had before them."""
        self._freed_s: float | None = None
        self._interval_s = math.inf
        self._restore_s_per_token = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, demand: Demand, room: Room | None) -> AsyncGenerator[Stay]:
        """Hold a place for a turn, or go without one. Raises NoPlace when none came in time.

        `room` is the engine's as it is now; None, where it doesn't say, lets everybody in.
        """
        if room is None:
            yield Stay()
            return
        stay = await self._enter(demand, room)
        try:
            yield stay
        finally:
            self._leave(demand, stay)

    def withdraw(self, rid: str) -> bool:
        """End a turn that waits, with EngineFailed; whether it did."""
        for waiting in self._queue:
            if waiting.demand.rid == rid and not waiting.admitted.done():
                waiting.admitted.set_exception(EngineFailed())
                return True
        return False

    async def _enter(self, demand: Demand, room: Room) -> Stay:
        places = self._places_in(room)
        if demand.session in places or not self._queue:
            stay = self._grant(demand, places)
            if stay is not None:
                self._observe()
                return stay
        return await self._wait(demand)

    async def _wait(self, demand: Demand) -> Stay:
        """Wait to be let in."""
        begun_s = _now_s()
        waiting = _Waiting(demand, asyncio.get_running_loop().create_future())
        self._queue.add(demand.tenant, demand.priority, waiting)
        self._metrics.waited.labels(demand.tenant).inc()
        self._serve()
        try:
            async with asyncio.timeout_at(demand.asked_s + self._settings.wait_s):
                return await waiting.admitted
        except BaseException as error:
            admitted = waiting.admitted
            left_queue = not self._queue.remove(demand.tenant, waiting)
            if left_queue and not admitted.cancelled() and admitted.exception() is None:
                # It was let in just when it gave up.
                self._leave(demand, admitted.result())
            self._serve()
            if isinstance(error, TimeoutError):
                self._metrics.refused.labels(demand.tenant).inc()
                raise NoPlace(self._retry_s()) from None
            raise
        finally:
            self._metrics.wait.observe(_now_s() - begun_s)

    def _grant(self, demand: Demand, places: Places) -> Stay | None:
        """Let a turn in, if it can be now."""
        moved_in = demand.session not in places and demand.session in self._known
        shared = self._known.get(demand.session, 0)
        tokens = max(1, demand.prompt_tokens - shared) + min(demand.output_tokens, _OUTPUT_TOKENS)
        if places.enter(demand.session, demand.tenant, tokens):
            return Stay(places, tokens, moved_in=moved_in)
        if self._settings.store and self._restores(demand, places) and places.visit(demand.tenant, tokens):
            self._metrics.restored.labels(demand.tenant).inc()
            return Stay(places, tokens, visits=True, moved_in=moved_in)
        return None

    def _restores(self, demand: Demand, places: Places) -> bool:
        """Whether bringing the session back is estimated to take less time than the next place does."""
        return self._restore_s_per_token * demand.prompt_tokens < self._place_s(places)

    def _leave(self, demand: Demand, stay: Stay) -> None:
        if stay.moved_in and stay.first_s is not None:
            measured = stay.first_s / demand.prompt_tokens
            self._restore_s_per_token += _SMOOTHING * (measured - self._restore_s_per_token)
        # What a new session finds is what others left, such as a system prompt; what it finds when it asks
        # again, after its first turn broke off, may be its own.
        shared = 0 if demand.continued or stay.first_s is None else stay.cached_tokens
        self._remember(demand.session, shared)
        assert stay.places is not None, "the engine has places"
        if stay.visits:
            stay.places.part(demand.tenant, stay.tokens)
        elif stay.first_s is None:  # the engine has begun nothing
            stay.places.undo(demand.session, stay.tokens)
        else:
            own = max(0, demand.prompt_tokens - self._known[demand.session])
            stay.places.rest(demand.session, stay.tokens, own + stay.output_tokens)
        self._serve()

    def _serve(self) -> None:
        """Let in whoever can be, and look again when the next place can be taken back."""
        places = self._places
        assert places is not None, "somebody has asked"
        while (waiting := self._queue.first(places.held)) is not None:
            if not self._admit(waiting, places):
                break
            for other in [each for each in self._queue if each.demand.session in places]:
                self._admit(other, places)
        self._observe()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue and (due_s := next(places.free_s(), None)) is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s + _TICK_S, self._serve)

    def _admit(self, waiting: _Waiting, places: Places) -> bool:
        """Let a turn that waits in, if it can be, or has left; whether it waits no more."""
        if not waiting.admitted.done():
            stay = self._grant(waiting.demand, places)
            if stay is None:
                return False
            waiting.admitted.set_result(stay)
        self._queue.remove(waiting.demand.tenant, waiting)
        return True

    def _places_in(self, room: Room) -> Places:
        if self._places is None or self._places.room != room:
            settings = self._settings
            self._places = Places(
                room,
                hold_s=settings.hold_s,
                share=settings.share,
                clock=_now_s,
                taken_back=self._taken_back,
            )
        return self._places

    def _remember(self, session: str, shared: int) -> None:
        """Note that a session was here; `shared` is what it shares with others, if it is new."""
        self._known.setdefault(session, shared)
        self._known.move_to_end(session)
        if len(self._known) > _KNOWN_SESSIONS:
            self._known.popitem(last=False)

    def _taken_back(self, reason: Reason) -> None:
        """Follow how long it takes until the next place is free."""
        self._metrics.taken_back.labels(reason).inc()
        now_s = _now_s()
        if self._freed_s is not None:
            interval_s = now_s - self._freed_s
            if math.isinf(self._interval_s):
                self._interval_s = interval_s
            self._interval_s += _SMOOTHING * (interval_s - self._interval_s)
        self._freed_s = now_s

    def _place_s(self, places: Places) -> float:
        """How long it takes until the next place is free."""
        place_s = min(self._interval_s, next(places.free_s(), math.inf) - _now_s())
        return self._settings.hold_s if math.isinf(place_s) else max(0.0, place_s)

    def _retry_s(self) -> int:
        assert self._places is not None, "somebody has asked"
        low, high = _RETRY_S
        wait_s = self._place_s(self._places) * (len(self._queue) + 1)
        return min(high, max(low, math.ceil(wait_s)))

    def _observe(self) -> None:
        places = self._places
        assert places is not None, "somebody has asked"
        self._metrics.places.labels(self._engine).set(len(places))
        self._metrics.place_tokens.labels(self._engine).set(places.tokens)
        self._metrics.room_tokens.labels(self._engine).set(places.limit_tokens)
        self._metrics.waiting.labels(self._engine).set(len(self._queue))
