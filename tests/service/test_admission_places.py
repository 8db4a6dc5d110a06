"""Places: who holds one, who loses his, who is let in beside them; and the queue for them."""

import pytest

from service.admission import priority_of
from service.admission_places import Places, Reason, Room
from service.admission_queue import FairQueue

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
