"""Places, the queue for them and admission, on a clock that jumps to the next thing that is due."""

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from bench.engines import Engine as RunningEngine
from service.admission import Admission, AdmissionSettings, Demand, priority_of
from service.admission_metrics import AdmissionMetrics
from service.admission_places import Places, Reason, Room
from service.admission_queue import FairQueue
from service.cli import main
from service.engine import Engine
from service.errors import EngineFailed, NoPlace
from service.generation import Chunk

ROOM = Room(kv_tokens=1000)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def places(
    clock: Clock, room: Room = ROOM, *, hold_s: float = 10.0, lost: list[Reason] | None = None
) -> Places:
    return Places(
        room, hold_s=hold_s, share=1.0, clock=clock, taken_back=(lost if lost is not None else []).append
    )


def test_a_place_is_kept_while_the_tool_runs_and_lost_after_that(clock: Clock):
    lost: list[Reason] = []
    held = places(clock, lost=lost)
    assert held.enter("a", "t", 600)
    held.rest("a", 600, 700)
    assert held.tokens == 700 and list(held.free_s()) == [110.0]
    assert not held.enter("b", "t", 400)
    clock.now_s += 9.9
    assert not held.enter("b", "t", 400) and held.enter("a", "t", 750)
    held.rest("a", 750, 800)
    clock.now_s += 10
    assert held.enter("b", "t", 400)
    assert "a" not in held and lost == ["idle"]


def test_the_one_that_is_idle_longest_goes_first(clock: Clock):
    held = places(clock)
    for session in "abc":
        assert held.enter(session, "t", 300)
        held.rest(session, 300, 300)
        clock.now_s += 1
    clock.now_s += 10
    assert held.enter("d", "t", 300)
    assert [session in held for session in "abcd"] == [False, True, True, True]


def test_running_sessions_keep_their_places_whatever_they_need(clock: Clock):
    held = places(clock)
    assert held.enter("a", "t", 600) and held.enter("b", "t", 300)
    clock.now_s += 1000
    assert not held.enter("c", "t", 200)
    assert held.enter("a", "t", 500), "a sub-agent beside its parent"
    assert held.tokens == 1400


def test_sessions_that_outgrow_the_room_cost_the_idle_ones_theirs(clock: Clock):
    lost: list[Reason] = []
    held = places(clock, lost=lost)
    for session in "abc":
        assert held.enter(session, "t", 300)
    for session in "ab":
        held.rest(session, 300, 300)
        clock.now_s += 1
    held.rest("c", 300, 450)
    assert [session in held for session in "abc"] == [False, True, True] and lost == ["outgrown"]


def test_one_session_alone_always_runs(clock: Clock):
    held = places(clock)
    assert held.enter("a", "t", 5000)
    assert not held.enter("b", "t", 1)
    held.rest("a", 5000, 5000)
    assert "a" not in held and held.enter("b", "t", 1)


def test_a_session_that_shrank_needs_less_after_a_while(clock: Clock):
    held = places(clock, hold_s=10)
    for size, wait_s in ((800, 1), (100, 9)):
        assert held.enter("a", "t", size)
        held.rest("a", size, size)
        assert held.tokens == 800
        clock.now_s += wait_s
    clock.now_s += 1
    assert held.enter("a", "t", 120)
    held.rest("a", 120, 120)
    assert held.tokens == 120


def test_states_bound_the_places(clock: Clock):
    room = Room(kv_tokens=10**6, state_slots=12, running_requests=2)
    assert [room.places(active) for active in (0, 1, 2, 9)] == [4, 3, 2, 2]
    held = places(clock, room)
    assert held.enter("a", "t", 1) and held.enter("b", "t", 1)
    assert not held.enter("c", "t", 1)


def test_what_comes_to_nothing_leaves_nothing(clock: Clock):
    held = places(clock)
    assert held.enter("a", "t", 900)
    held.undo("a", 900)
    assert "a" not in held and held.tokens == 0
    assert held.enter("a", "t", 100)
    held.rest("a", 100, 100)
    assert held.enter("a", "t", 900)
    held.undo("a", 900)
    assert held.tokens == 100 and len(list(held.free_s())) == 1


def test_visits_fit_beside_the_turns_that_run(clock: Clock):
    held = places(clock, Room(kv_tokens=1000, running_requests=3))
    assert held.enter("a", "t", 800)
    held.rest("a", 800, 800)
    assert held.visit("t", 700), "what is idle gives way"
    assert not held.visit("t", 400)
    assert held.visit("t", 200) and held.visit("t", 50)
    assert not held.visit("t", 10), "as many run as can"
    assert held.held("t") == 800 + 950 and held.held("u") == 0
    held.part("t", 50)
    assert held.enter("a", "t", 850), "its place is its own"
    assert not held.visit("t", 10)
    for tokens in (700, 200):
        held.part("t", tokens)
    assert held.visit("t", 100)
    held.part("t", 100)
    held.rest("a", 850, 850)
    assert held.visit("t", 5000), "alone anything is let in"


def test_the_tenant_that_holds_least_is_next_and_priorities_are_its_own():
    queue: FairQueue[str] = FairQueue()
    for tenant, priority, item in (("a", 0, "a1"), ("a", 1, "a2"), ("b", -1, "b1"), ("b", 0, "b2")):
        queue.add(tenant, priority, item)
    held = {"a": 10, "b": 10}
    order: list[str] = []
    while (item := queue.first(held.__getitem__)) is not None:
        order.append(item)
        assert queue.remove(item[0], item) and not queue.remove(item[0], item)
        held[item[0]] += 1
    assert order == ["a2", "b2", "a1", "b1"] and not len(queue)


def test_the_service_tier_is_the_priority():
    order = sorted(["flex", "auto", None, "priority", 7, "standard_only"], key=priority_of)
    assert order == ["flex", "auto", None, 7, "standard_only", "priority"]


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


SIZES = {
    "max_total_num_tokens": 1000,
    "internal_states": [{"max_mamba_cache_size": 6, "effective_max_running_requests_per_dp": 1}],
}
"""An engine that holds the states of one session."""


@pytest.fixture
def small(fake_engine: FakeEngine) -> FakeEngine:
    cast("dict[str, Any]", fake_engine.server_info).update(SIZES)
    return fake_engine


def occupied(engine: FakeEngine) -> asyncio.Event:
    """Let turns run until the event is set."""
    ended = asyncio.Event()
    said = engine.reply({"content": "Hi"})

    async def script(body: Mapping[str, Any]) -> AsyncIterator[Any]:
        await ended.wait()
        async for event in said(body):
            yield event

    engine.script = script
    return ended


async def busy(gateway: Gateway) -> asyncio.Task[httpx.Response]:
    """A session whose turn runs."""
    running = asyncio.create_task(gateway.chat(session_id="busy"))
    while not gateway.engine.requests:
        await asyncio.sleep(0.005)
    return running


async def until_waiting(gateway: Gateway, count: int) -> None:
    name = f'longhaul_admission_waiting_turns{{engine="{gateway.engine.url.removeprefix("http://")}"}}'
    async with asyncio.timeout(10):
        while await gateway.metric(name) != count:
            await asyncio.sleep(0.01)


async def test_the_room_is_what_the_engine_says(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory() as gateway:
        assert (await gateway.service.engines.info()).room == Room(1000, 6, 1)


@pytest.mark.engine
async def test_sglang_says_the_sizes_of_its_pools(engine: RunningEngine):
    async with Engine(engine.url, vocabulary=8) as client:
        assert (await client.info()).room == Room(262_144, 256, 8)


async def test_a_refused_turn_says_when_to_come_again(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory(admission=AdmissionSettings(wait_s=0.2)) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        for path, status in (("/v1/chat/completions", 503), ("/v1/responses", 503), ("/v1/messages", 529)):
            messages = [{"role": "user", "content": "Hi"}]
            body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 9, "session_id": "other"}
            body |= {"input": "Hi"} if path.endswith("responses") else {"messages": messages}
            answer = await gateway.http.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "overloaded_error"
        ended.set()
        assert (await running).status_code == 200
        assert len(small.requests) == 1
        assert await gateway.metric('longhaul_admission_refused_total{tenant="default"}') == 3


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        ("/v1/chat/completions", ": ping"),
        ("/v1/responses", ": ping"),
        ("/v1/messages", "event: ping"),
    ],
)
async def test_a_stream_that_waits_is_pinged(
    small: FakeEngine, gateway_factory: GatewayFactory, path: str, ping: str
):
    options = {"grace_s": 0.05, "ping_interval_s": 0.05}
    settings = AdmissionSettings(hold_s=0)
    async with gateway_factory(admission=settings, **options) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 9, "session_id": "other", "stream": True}
        message = {"role": "user", "content": "Hi"}
        body |= {"input": "Hi"} if path.endswith("responses") else {"messages": [message]}
        async with gateway.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines: list[str] = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if line == ping and not ended.is_set():
                    assert len(small.requests) == 1, "only the busy one runs"
                    ended.set()
        assert ping in lines and not any("error" in line for line in lines if "null" not in line)
        await running
        assert len(small.requests) == 2


async def test_a_client_that_leaves_while_it_waits_is_forgotten(
    small: FakeEngine, gateway_factory: GatewayFactory
):
    async with gateway_factory(admission=AdmissionSettings(hold_s=0)) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        leaving = asyncio.create_task(gateway.chat(session_id="leaving"))
        await until_waiting(gateway, 1)
        leaving.cancel()
        await until_waiting(gateway, 0)
        ended.set()
        await running
        assert (await gateway.chat(session_id="third")).status_code == 200
        assert len(small.requests) == 2 and not small.aborted


async def test_a_client_that_leaves_while_it_is_served_leaves_its_place(
    small: FakeEngine, gateway_factory: GatewayFactory
):
    async with gateway_factory(admission=AdmissionSettings(hold_s=0)) as gateway:
        small.script = small.reply({"content": "word " * 500}, delay_s=0.05)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "session_id": "leaving"}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while "content" not in await anext(lines):
                pass
            waiting = asyncio.create_task(gateway.chat(session_id="next"))
            await until_waiting(gateway, 1)
            small.script = small.reply({"content": "Hi"})
        assert (await waiting).status_code == 200
        assert len(small.aborted) == 1


async def test_a_response_that_waits_can_be_cancelled(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory(admission=AdmissionSettings(), grace_s=0.05) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        stream = await gateway.openai.responses.create(
            model="kimi-k3", input="Hi", stream=True, prompt_cache_key="other"
        )
        kinds: list[str] = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.created":
                await until_waiting(gateway, 1)
                answer = await gateway.http.post(f"/v1/responses/{event.response.id}/cancel")
                assert answer.json()["status"] == "cancelled"
        assert kinds[-1] == "response.incomplete"
        await until_waiting(gateway, 0)
        ended.set()
        await running
        assert len(small.requests) == 1 and not small.aborted


async def test_without_admission_everybody_goes_at_once(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory() as gateway:
        ended = occupied(small)
        turns = [asyncio.create_task(gateway.chat(session_id=f"s{number}")) for number in range(5)]
        async with asyncio.timeout(10):
            while len(small.requests) < 5:
                await asyncio.sleep(0.005)
        ended.set()
        assert {answer.status_code for answer in await asyncio.gather(*turns)} == {200}
        assert "longhaul_admission" not in (await gateway.http.get("/metrics")).text


@pytest.mark.parametrize("option", ["--admission-share=0", "--admission-wait-s=-1"])
def test_settings_out_of_range_are_refused(
    option: str, tokenizer_directory: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["gateway", "--model", str(tokenizer_directory), "--admission", "on", option]
    assert main(arguments) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
