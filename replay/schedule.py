"""When each request of a session is due.

Closed loop, as in AgentX: a gap runs from the end of an answer to the next request, so a slow server moves
what follows, and gaps are cut to `idle_cap_s` and then multiplied by `time_scale`. A sub-agent starts a gap
after the request before it and runs beside its parent; the request that waits for it is due when both its
own gap and the recorded time since the sub-agent's end have passed.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from replay.trace import Session


class Clock(Protocol):
    """Seconds, and waiting for them."""

    def now(self) -> float:
        """The time in seconds."""
        ...

    async def sleep_until(self, due_s: float) -> None:
        """Wait until `due_s`."""
        ...


class SystemClock:
    """`time.perf_counter`, which the client's times are on too."""

    def now(self) -> float:
        """The time in seconds."""
        return time.perf_counter()

    async def sleep_until(self, due_s: float) -> None:
        """Wait until `due_s`; yields once when it has passed."""
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


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


@dataclass(frozen=True, slots=True)
class SessionSchedule:
    """Runs the requests of one session in their order."""

    session: Session
    pace: Pace
    clock: Clock
    sender: Sender

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
        for number, request in enumerate(agent.requests):
            self.sender.prepare(index, number)
            if end_s is None:
                end_s = clock.now()
            if number == 0:
                spawn(None, end_s, recorded_s)
            due_s = end_s + pace.wait_s(request.start_s - recorded_s)
            for child, task in running.items():
                if session.agents[child].joined_before == number:
                    since_s = request.start_s - session.agents[child].end_s
                    due_s = max(due_s, await task + pace.wait_s(since_s))
            await clock.sleep_until(due_s)
            await self.sender.send(index, number, due_s)
            end_s, recorded_s = clock.now(), request.end_s
            spawn(number, end_s, recorded_s)
        if end_s is None or not agent.requests:
            end_s = clock.now() if end_s is None else end_s
            spawn(None, end_s, recorded_s)
        return end_s
