"""Who is sent when, on a clock that only moves when everybody waits."""

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

import pytest

from replay.formats import read_sessions
from replay.schedule import Pace, SessionSchedule, SystemClock
from replay.trace import Agent, Request, Session

UNCHANGED = Pace()


class FakeClock:
    def __init__(self):
        self.time_s = 0.0
        self.waiting = []
        self.order = itertools.count()

    def now(self) -> float:
        return self.time_s

    async def sleep_until(self, due_s: float) -> float:
        if due_s > self.time_s:
            passed = asyncio.get_running_loop().create_future()
            heapq.heappush(self.waiting, (due_s, next(self.order), passed))
            await passed
        return due_s

    async def run(self, work) -> None:
        task = asyncio.ensure_future(work)
        while True:
            for _ in range(50):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            self.time_s, _, passed = heapq.heappop(self.waiting)
            if not passed.done():
                passed.set_result(None)


@dataclass
class Server:
    """Answers every request after `service_s`, or as long as `slow` says for one of them."""

    clock: FakeClock
    service_s: float = 1.0
    slow: dict[tuple[int, int], float] = field(default_factory=dict)
    sent: dict[tuple[int, int], float] = field(default_factory=dict)
    due: dict[tuple[int, int], float] = field(default_factory=dict)
    prepared: list[tuple[int, int]] = field(default_factory=list)

    def prepare(self, agent: int, number: int) -> None:
        self.prepared.append((agent, number))

    async def send(self, agent: int, number: int, due_s: float) -> None:
        assert (agent, number) in self.prepared
        self.sent[agent, number] = self.clock.now()
        self.due[agent, number] = due_s
        await self.clock.sleep_until(self.clock.now() + self.slow.get((agent, number), self.service_s))


def request(start_s: float, service_s: float = 2.0) -> Request:
    return Request(start_s, service_s, 64, 1, ())


def agent(name, *requests, start_s=None, end_s=None, **links) -> Agent:
    begin = requests[0].start_s if start_s is None else start_s
    end = requests[-1].end_s if end_s is None else end_s
    return Agent(name, 0, requests, begin, end, **links)


async def run(session: Session, pace: Pace = UNCHANGED, **server) -> Server:
    clock = FakeClock()
    result = Server(clock, **server)
    await clock.run(SessionSchedule(session, pace, clock, result).run())
    assert result.sent == result.due
    return result


async def test_a_gap_runs_from_the_end_of_the_answer():
    session = Session("s", 64, (agent("root", request(0), request(10), request(11)),))
    assert (await run(session)).sent == {(0, 0): 0, (0, 1): 1 + 8, (0, 2): 10 + 0}
    slow = await run(session, slow={(0, 0): 100.0})
    assert slow.sent == {(0, 0): 0, (0, 1): 108, (0, 2): 109}


async def test_gaps_are_capped_then_scaled():
    session = Session("s", 64, (agent("root", request(0), request(1002), request(1104)),))
    sent = (await run(session, Pace(time_scale=0.5, idle_cap_s=300))).sent
    assert sent == {(0, 0): 0, (0, 1): 1 + 150, (0, 2): 152 + 50}
    assert (await run(session, Pace(time_scale=0))).sent == {(0, 0): 0, (0, 1): 1, (0, 2): 2}


def family(joined_before, end_s=None) -> Session:
    root = agent("root", request(0), request(10), request(40))
    child = agent(
        "child", request(5), request(9), end_s=end_s, parent=0, spawned_after=0, joined_before=joined_before
    )
    return Session("s", 64, (root, child))


async def test_a_sub_agent_runs_beside_its_parent_and_the_joining_turn_waits():
    sent = (await run(family(joined_before=2))).sent
    assert sent[1, 0] == 1 + 3  # 3 s after the recorded answer
    assert sent[1, 1] == 5 + 2
    assert sent[0, 1] == 1 + 8
    assert sent[0, 2] == 10 + 28  # its own gap is longer than the sub-agent
    slow = (await run(family(joined_before=2), slow={(1, 1): 500.0})).sent
    assert slow[0, 1] == 9
    assert slow[0, 2] == 7 + 500 + (40 - 11)  # the time that passed since the sub-agent's end


async def test_nobody_waits_for_a_background_agent_but_the_session_does():
    server = await run(family(joined_before=None), slow={(1, 1): 500.0})
    assert server.sent[0, 2] == 10 + 28
    assert server.clock.time_s == 507


async def test_sub_agents_of_a_recorded_session_start_together(traces):
    (session,) = read_sessions([traces / "trace_0291_cut.json"])
    sent = (await run(session, Pace(time_scale=0), service_s=10.0)).sent
    assert len(sent) == session.turns
    assert sent[1, 0] == sent[2, 0] == sent[0, 3] + 10
    assert sent[0, 4] == sent[1, 2] + 10
    assert sent[0, 5] == max(sent[0, 4], sent[2, 2]) + 10


async def test_a_sub_agent_may_start_with_the_session():
    root = agent("root", request(4), start_s=0)
    child = agent("child", request(1), parent=0)
    assert (await run(Session("s", 64, (root, child)))).sent == {(0, 0): 4, (1, 0): 1}


async def test_a_root_without_requests_still_has_its_sub_agents():
    root = Agent("root", 0, (), 0.0, 0.0)
    child = agent("child", request(3), parent=0)
    assert (await run(Session("s", 64, (root, child)))).sent == {(1, 0): 3}


async def test_the_system_clock_waits():
    clock = SystemClock()
    due = clock.now() + 0.02
    await clock.sleep_until(due)
    assert due <= clock.now() < due + 0.5
    await clock.sleep_until(clock.now() - 1)


@pytest.mark.parametrize("values", [{"time_scale": -1}, {"idle_cap_s": -1}])
def test_a_pace_is_not_negative(values):
    with pytest.raises(ValueError, match="negative"):
        Pace(**values)
