"""When each request of a session is due.

Closed loop, as in AgentX: a gap runs from the end of an answer to the next request, so a slow server moves
what follows, and gaps are cut to `idle_cap_s` and then multiplied by `time_scale`. A sub-agent starts a gap
after the request before it and runs beside its parent; the request that waits for it is due when both its
own gap and the recorded time since the sub-agent's end have passed. A session that does not begin at its
beginning has no sub-agents of the time before.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

from replay.trace import Session


class Clock(Protocol):
    """Seconds, and waiting for them."""

    def now(self) -> float:
        """The time in seconds."""
        ...

    async def sleep_until(self, due_s: float) -> float:
        """Wait until `due_s`; when it really was due."""
        ...


class SystemClock:
    """`time.perf_counter`, which the client's times are on too."""

    def now(self) -> float:
        """The time in seconds."""
        return time.perf_counter()

    async def sleep_until(self, due_s: float) -> float:
        """Wait until `due_s`; yields once when it has passed."""
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return due_s


@dataclass(slots=True)
class _Sleeper:
    due_s: float
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class IdleCapClock:
    """`time.perf_counter`, and no more than `cap_s` without a request in flight.

    When all that is left is to wait for longer, everything that is due moves forward by the same time.
    """

    def __init__(self, cap_s: float) -> None:
        self._cap_s = cap_s
        self._sleepers: list[_Sleeper] = []
        self._flying = 0
        self._idle_since_s = time.perf_counter()
        self.skipped_s = 0.0

    def now(self) -> float:
        """The time in seconds."""
        return time.perf_counter()

    @contextlib.contextmanager
    def request(self) -> Generator[None]:
        """A request is in flight."""
        self._flying += 1
        try:
            yield
        finally:
            self._flying -= 1
            self._idle_since_s = time.perf_counter()
            # What follows the answer is planned first.
            asyncio.get_running_loop().call_soon(self._skip)

    async def sleep_until(self, due_s: float) -> float:
        """Wait until `due_s` or when it was moved to, which is returned."""
        sleeper = _Sleeper(due_s)
        self._sleepers.append(sleeper)
        asyncio.get_running_loop().call_soon(self._skip)
        try:
            while (left_s := sleeper.due_s - time.perf_counter()) > 0:
                sleeper.moved.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sleeper.moved.wait(), left_s)
            await asyncio.sleep(0)
        finally:
            self._sleepers.remove(sleeper)
        return sleeper.due_s

    def _skip(self) -> None:
        if self._flying or not self._sleepers:
            return
        latest_s = max(self._idle_since_s + self._cap_s, time.perf_counter())
        surplus_s = min(sleeper.due_s for sleeper in self._sleepers) - latest_s
        if surplus_s > 0:
            self.skipped_s += surplus_s
            for sleeper in self._sleepers:
                sleeper.due_s -= surplus_s
                sleeper.moved.set()


@dataclass(frozen=True, slots=True)
class Pace:
    """How recorded gaps become waits."""

    time_scale: float = 1.0
    idle_cap_s: float = 300.0

    def __post_init__(self) -> None:
        if self.time_scale < 0 or self.idle_cap_s < 0:
            raise ValueError(f"time scale and idle cap must not be negative: {self}")

    def wait_s(self, gap_s: float) -> float:
        """The wait for a recorded gap; overlaps (negative gaps) become 0."""
        return min(max(0.0, gap_s), self.idle_cap_s) * self.time_scale


class Sender(Protocol):
    """Sends the requests of one session; requests are named by agent index and number."""

    def prepare(self, agent: int, number: int) -> None:
        """Do what can be done before the request is due."""
        ...

    async def send(self, agent: int, number: int, due_s: float) -> None:
        """Send the request and return when its answer has ended; a failed request does not raise."""
        ...

    async def warm_up(self, agent: int, number: int) -> None:
        """Send the request for its prompt alone."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """Where a session begins: with the root's request `first`, after a share of the gap before it.

    The `warm_up` requests before it are sent at once for their prompts alone, then `ready` is awaited.
    """

    first: int = 0
    warm_up: int = 0
    gap_share: float = 1.0
    ready: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class SessionSchedule:
    """Runs the requests of one session in their order."""

    session: Session
    pace: Pace
    clock: Clock
    sender: Sender
    start: Start = Start()

    async def run(self) -> None:
        """Send every request when it is due; ends when all agents have, also those that nobody waits for."""
        async with asyncio.TaskGroup() as group:
            await self._run_agent(0, None, group)

    async def _run_agent(self, index: int, start_s: float | None, group: asyncio.TaskGroup) -> float:
        """Run an agent from `start_s` (default: now) on; returns when its last answer ended."""
        session, pace, clock = self.session, self.pace, self.clock
        agent = session.agents[index]
        running: dict[int, asyncio.Task[float]] = {}

        def spawn(after: int | None, end_s: float, recorded_s: float) -> None:
            for number, child in enumerate(session.agents):
                if child.parent == index and child.spawned_after == after:
                    child_s = end_s + pace.wait_s(child.start_s - recorded_s)
                    running[number] = group.create_task(self._run_agent(number, child_s, group))

        end_s, recorded_s = start_s, agent.start_s
        start = self.start if index == 0 else Start()
        for number, request in enumerate(agent.requests):
            if number < start.first:
                if number >= start.first - start.warm_up:
                    self.sender.prepare(index, number)
                    await self.sender.warm_up(index, number)
                recorded_s = request.end_s
                continue
            self.sender.prepare(index, number)
            if number == start.first and start.ready is not None:
                await start.ready()
                end_s = clock.now()
            if end_s is None:
                end_s = clock.now()
            if number == 0:
                spawn(None, end_s, recorded_s)
            share = start.gap_share if number == start.first else 1.0
            due_s = end_s + pace.wait_s(request.start_s - recorded_s) * share
            for child, task in running.items():
                if session.agents[child].joined_before == number:
                    since_s = request.start_s - session.agents[child].end_s
                    due_s = max(due_s, await task + pace.wait_s(since_s))
            await self.sender.send(index, number, await clock.sleep_until(due_s))
            end_s, recorded_s = clock.now(), request.end_s
            spawn(number, end_s, recorded_s)
        if end_s is None or not agent.requests:
            end_s = clock.now() if end_s is None else end_s
            spawn(None, end_s, recorded_s)
        return end_s
