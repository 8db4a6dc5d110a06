"""Admission on a clock that jumps to the next thing that is due."""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from service.admission import Admission, AdmissionSettings, Demand
from service.admission_metrics import AdmissionMetrics
from service.admission_places import Room
from service.errors import EngineFailed, NoPlace
from service.generation import Chunk

ROOM = Room(kv_tokens=1000)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._jumped_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._jumped_s

    def jump(self, seconds: float) -> None:
        self._jumped_s += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is due: a deadlock"
        self._loop.jump(max(0.0, timeout))
        return super().select(0)


def jumping(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(work)


def admission(**more: Any) -> tuple[Admission, Callable[[str], float]]:
    registry = CollectorRegistry()

    def value(name: str) -> float:
        return sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == f"longhaul_admission_{name}"
        )

    made: dict[str, Any] = {"share": 1.0, "hold_s": 10.0, "wait_s": 60.0, **more}
    return Admission("engine", AdmissionSettings(**made), AdmissionMetrics(registry)), value


async def turn(
    gate: Admission,
    session: str,
    tokens: int,
    *,
    tenant: str = "t",
    priority: int = 0,
    first_s: float = 0.0,
    runs_s: float = 1.0,
    log: list[tuple[str, float]] | None = None,
) -> None:
    """A turn that takes `runs_s`; notes when it was let in."""
    demand = Demand(session, tenant, session, tokens, 0, priority)
    async with gate.turn(demand, ROOM) as stay:
        if log is not None:
            log.append((session, asyncio.get_running_loop().time()))
        await asyncio.sleep(first_s)
        stay.saw(Chunk(ids=[1]))
        await asyncio.sleep(runs_s - first_s)


def test_sessions_beyond_the_room_wait_and_those_in_it_go_on():
    async def work() -> None:
        gate, value = admission()
        log: list[tuple[str, float]] = []
        await turn(gate, "a", 600, log=log)
        waiting = asyncio.create_task(turn(gate, "b", 600, log=log))
        await asyncio.sleep(5)
        await turn(gate, "a", 650, log=log)
        await waiting
        names, times = zip(*log, strict=True)
        assert names == ("a", "a", "b")
        # b came at 1, a rests from 7 on, and has lost its place 10 s later.
        assert times == pytest.approx((0, 6, 17), abs=0.01)
        assert value("waited_total") == 1 and value("taken_back_total") == 1
        assert value("wait_seconds_sum") == pytest.approx(16, abs=0.01)
        assert (value("places"), value("waiting_turns"), value("room_tokens")) == (1, 0, 1000)

    jumping(work())


def test_a_wait_is_bounded():
    async def work() -> None:
        gate, value = admission(wait_s=5)
        running = asyncio.create_task(turn(gate, "a", 900, runs_s=100))
        await asyncio.sleep(1)
        with pytest.raises(NoPlace) as caught:
            await turn(gate, "b", 900)
        assert asyncio.get_running_loop().time() == pytest.approx(6, abs=0.01)
        assert caught.value.status == 503 and 1 <= (caught.value.retry_after_s or 0) <= 60
        assert value("refused_total") == 1 and value("waiting_turns") == 0
        await running

    jumping(work())


def test_a_client_that_leaves_gives_up_its_wait():
    async def work() -> None:
        gate, value = admission()
        log: list[tuple[str, float]] = []
        running = asyncio.create_task(turn(gate, "a", 900, runs_s=5))
        await asyncio.sleep(1)
        leaving, staying = (asyncio.create_task(turn(gate, session, 900, log=log)) for session in ("b", "c"))
        await asyncio.sleep(1)
        leaving.cancel()
        await asyncio.gather(running, leaving, staying, return_exceptions=True)
        assert leaving.cancelled() and [name for name, _ in log] == ["c"]
        assert value("waiting_turns") == 0

    jumping(work())


def test_who_leaves_just_when_let_in_leaves_the_place_to_the_next():
    async def work() -> None:
        gate, value = admission(hold_s=0)
        log: list[tuple[str, float]] = []
        waiting: list[asyncio.Task[None]] = []

        async def first() -> None:
            await turn(gate, "a", 900)
            # `a` has rested and `b` been let in, but has not run since.
            assert value("waiting_turns") == 1 and not log
            waiting[0].cancel()

        running = asyncio.create_task(first())
        await asyncio.sleep(0.5)
        waiting += [asyncio.create_task(turn(gate, session, 900, log=log)) for session in ("b", "c")]
        await running
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [name for name, _ in log] == ["c"] and waiting[0].cancelled()

    jumping(work())


def test_a_turn_that_waits_can_be_withdrawn():
    async def work() -> None:
        gate, value = admission()
        running = asyncio.create_task(turn(gate, "a", 900, runs_s=5))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(turn(gate, "b", 900))
        await asyncio.sleep(1)
        assert gate.withdraw("b") and not gate.withdraw("b") and not gate.withdraw("a")
        with pytest.raises(EngineFailed):
            await waiting
        await running
        assert value("waiting_turns") == 0

    jumping(work())


def test_an_engine_that_begins_nothing_leaves_no_place_behind():
    async def work() -> None:
        gate, value = admission()
        with pytest.raises(RuntimeError):
            async with gate.turn(Demand("r", "t", "a", 900, 0, 0), ROOM):
                raise RuntimeError
        assert value("places") == 0

    jumping(work())


def test_a_crowd_of_one_tenant_does_not_keep_another_waiting():
    async def work() -> None:
        gate, _ = admission(hold_s=0, wait_s=1000)
        log: list[tuple[str, float]] = []
        crowd = [
            asyncio.create_task(turn(gate, f"a{number}", 300, tenant="a", log=log)) for number in range(30)
        ]
        await asyncio.sleep(0.5)
        await turn(gate, "b", 300, tenant="b", log=log)
        await asyncio.gather(*crowd)
        assert dict(log)["b"] == pytest.approx(1, abs=0.01), "with the first places that became free"

    jumping(work())


def test_priorities_go_first():
    async def work() -> None:
        gate, _ = admission(hold_s=0)
        log: list[tuple[str, float]] = []
        turns = [asyncio.create_task(turn(gate, "first", 900, log=log))]
        await asyncio.sleep(0.5)
        for session, priority in (("flex", -1), ("plain", 0), ("urgent", 1)):
            turns.append(asyncio.create_task(turn(gate, session, 900, priority=priority, log=log)))
        await asyncio.gather(*turns)
        assert [name for name, _ in log] == ["first", "urgent", "plain", "flex"]

    jumping(work())


def test_a_waiting_session_that_got_a_place_goes_with_all_its_turns():
    async def work() -> None:
        gate, _ = admission(hold_s=0)
        log: list[tuple[str, float]] = []
        turns = [asyncio.create_task(turn(gate, "first", 900, log=log))]
        await asyncio.sleep(0.5)
        for session in ("b", "c", "b"):
            turns.append(asyncio.create_task(turn(gate, session, 500, log=log)))
        await asyncio.gather(*turns)
        assert [name for name, _ in log] == ["first", "b", "b", "c"]

    jumping(work())


@pytest.mark.parametrize(("first_s", "waits"), [(0.5, False), (8.0, True)])
def test_a_session_comes_back_from_the_store_when_that_is_faster(first_s: float, waits: bool):
    async def work() -> None:
        gate, value = admission(store=True, hold_s=5)
        # Restores are measured: a session that had lost its place comes back.
        for _ in range(40):
            for session in "ab":
                await turn(gate, session, 900, first_s=first_s, runs_s=first_s)
                await asyncio.sleep(6)
        assert value("restored_total") == 0
        await turn(gate, "a", 900, runs_s=1)
        log: list[tuple[str, float]] = []
        begun_s = asyncio.get_running_loop().time()
        await turn(gate, "b", 900, first_s=first_s, runs_s=first_s, log=log)
        assert value("restored_total") == (not waits)
        assert log[0][1] - begun_s == pytest.approx(5 if waits else 0, abs=0.01)

    jumping(work())


def test_what_a_new_session_finds_is_not_counted_again():
    async def work() -> None:
        gate, value = admission()
        with pytest.raises(RuntimeError):
            async with gate.turn(Demand("r", "t", "d", 600, 0, 0), Room(10_000)):
                raise RuntimeError
        for session, cached, continued in (
            ("a", 0, False),
            ("b", 500, False),
            ("c", 500, True),
            ("d", 500, False),  # what it finds may be its own
        ):
            before = value("place_tokens")
            for _ in range(2):
                demand = Demand(session, "t", session, 600, 0, 0, continued)
                async with gate.turn(demand, Room(10_000)) as stay:
                    stay.saw(Chunk(ids=[1], cached_device_tokens=cached))
                    stay.saw(Chunk(ids=[1]))
                assert value("place_tokens") - before == (102 if session == "b" else 602)

    jumping(work())


def test_with_a_store_turns_wait_here_and_not_within_the_engine():
    async def work() -> None:
        gate, value = admission(store=True, hold_s=100)
        running, most = 0, 0

        async def session(name: str) -> None:
            nonlocal running, most
            for _ in range(3):
                async with gate.turn(Demand(name, "t", name, 300, 0, 0), ROOM) as stay:
                    running += 1
                    most = max(most, running)
                    await asyncio.sleep(0.1)
                    stay.saw(Chunk(ids=[1]))
                    await asyncio.sleep(0.4)
                    running -= 1
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(session(f"s{number}"))
        # Three at a time, and those with a place at once: nobody waits for 100 s of idleness.
        assert 3 <= most <= 6
        assert value("waited_total") > 0 and value("restored_total") > 0
        assert asyncio.get_running_loop().time() < 12

    jumping(work())


def test_an_engine_that_does_not_say_its_sizes_takes_everybody():
    async def work() -> None:
        gate, value = admission()
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                demand = Demand(str(number), "t", str(number), 900, 0, 0)

                async def one(demand: Demand = demand) -> None:
                    async with gate.turn(demand, None):
                        await asyncio.sleep(1)

                group.create_task(one())
        assert asyncio.get_running_loop().time() == pytest.approx(1) and value("waited_total") == 0

    jumping(work())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    sessions=st.integers(1, 12),
    hold_s=st.sampled_from([0.0, 2.0, 30.0]),
    wait_s=st.sampled_from([0.0, 3.0, 1000.0]),
    store=st.booleans(),
)
def test_nobody_waits_for_ever_and_nothing_is_left(
    seed: int, sessions: int, hold_s: float, wait_s: float, store: bool
):
    """Random sessions, some of whose clients leave; a deadlock is an assertion of the loop."""

    async def session(gate: Admission, name: str, source: random.Random) -> None:
        size = source.randrange(50, 700)
        for _ in range(source.randrange(1, 6)):
            asked = asyncio.create_task(
                turn(gate, name, size, tenant=source.choice("xy"), runs_s=source.random() * 3)
            )
            if source.random() < 0.2:
                await asyncio.sleep(source.random() * 4)
                asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            if not asked.cancelled() and (error := asked.exception()) is not None:
                assert isinstance(error, NoPlace), error
            size += source.randrange(100)
            await asyncio.sleep(source.random() * 5)

    async def work() -> None:
        gate, value = admission(hold_s=hold_s, wait_s=wait_s, store=store)
        source = random.Random(seed)
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(session(gate, f"s{number}", random.Random(source.random())))
        assert value("waiting_turns") == 0
        assert value("place_tokens") <= max(value("room_tokens"), 0)
        # All are idle: whoever comes when they have been so for long enough is let in at once.
        await asyncio.sleep(hold_s + 0.1)
        begun_s, log = asyncio.get_running_loop().time(), list[tuple[str, float]]()
        await turn(gate, "late", 1000, log=log)
        assert log == [("late", begun_s)]

    jumping(work())
