from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.retention import TTL_MS, Chain, Lifetimes, Reason, Recent, StatePolicy

POLICY = StatePolicy(keep_every_tokens=32_768, page_tokens=64)


def test_the_tail_the_one_before_forks_and_one_every_32k_tokens_stay():
    states = list(range(36, 2219, 36))
    kept = POLICY.kept(Chain(states, forks={100}))
    assert kept == {
        72: Reason.FORK,
        540: Reason.SPACED,
        1080: Reason.SPACED,
        1620: Reason.SPACED,
        2160: Reason.SPACED,
        states[-2]: Reason.SPACED if states[-2] == 2160 else Reason.PRECEDING,
        states[-1]: Reason.TAIL,
    }
    assert set(POLICY.superseded(Chain(states, forks={100}))) == set(states) - set(kept)


@pytest.mark.parametrize(
    ("forks", "stay"),
    [
        (set(), {30, 40}),
        ({10}, {10, 30, 40}),  # right behind a state
        ({15}, {10, 30, 40}),  # between two states: the one before it
        ({19}, {10, 30, 40}),
        ({20}, {20, 30, 40}),
        ({5}, {30, 40}),  # before the first state: no state serves both
        ({15, 25}, {10, 20, 30, 40}),
    ],
)
def test_the_deepest_state_before_a_fork_stays(forks: set[int], stay: set[int]):
    assert set(POLICY.kept(Chain([10, 20, 30, 40], forks))) == stay


def test_the_first_states_all_stay():
    assert POLICY.kept(Chain([3])) == {3: Reason.TAIL}
    assert POLICY.kept(Chain([3, 5])) == {3: Reason.PRECEDING, 5: Reason.TAIL}
    assert POLICY.superseded(Chain([3, 5, 6])) == [3]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(1, 40_000))
def test_growing_a_chain_state_by_state_ends_where_judging_it_at_once_does(gaps: list[int], every: int):
    """The store forgets what was superseded: what stays must not depend on it."""
    policy = StatePolicy(keep_every_tokens=every, page_tokens=64)
    held: list[int] = []
    position = 0
    every_state: list[int] = []
    for gap in gaps:
        position += gap
        every_state.append(position)
        held = list(policy.kept(Chain([*held, position])))
        held.sort()
        assert held == sorted(policy.kept(Chain(every_state)))
    spaced = [p for p, reason in policy.kept(Chain(held)).items() if reason is Reason.SPACED]
    assert all((b - a) * 64 >= every for a, b in pairwise([0, *sorted(spaced)]))


@given(
    st.sampled_from(sorted(TTL_MS.values())),
    st.integers(0, 2**41),
    st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 10**8)), min_size=2, max_size=30),
)
def test_no_page_outlives_a_shallower_one(ttl_ms: int, start: int, uses: list[tuple[int, int]]):
    """Pages are written over time, each use prolonging all that is before it, as the store does."""
    lives = Lifetimes(ttl_ms)
    expires: dict[int, int] = {}
    now = start
    for position, wait in uses:
        now += wait
        for page in {*(p for p in expires if p < position), position}:
            until = now + lives.life_ms(now, page)
            assert until >= now + ttl_ms
            expires[page] = max(expires.get(page, 0), until)
        ordered = [expires[page] for page in sorted(expires)]
        assert all(shallow >= deep for shallow, deep in pairwise(ordered))


def test_a_chain_is_prolonged_once_a_step():
    lives = Lifetimes(TTL_MS["1h"])
    assert lives.step_ms == 300_000
    now = 7 * lives.step_ms
    assert lives.date_ms(now) == lives.date_ms(now + lives.step_ms - 1) < lives.date_ms(now + lives.step_ms)
    assert lives.life_ms(now, 1) <= TTL_MS["1h"] + 2 * lives.step_ms
    assert lives.life_ms(now, 10) > lives.life_ms(now, 11)
    assert lives.life_ms(now, 16_384) == lives.life_ms(now, 99_999) >= TTL_MS["1h"]


def test_what_makes_no_sense_is_refused():
    for states in ([], [0], [3, 3], [4, 2]):
        with pytest.raises(AssertionError):
            Chain(states)
    with pytest.raises(AssertionError):
        StatePolicy(0, 64)
    with pytest.raises(AssertionError):
        Lifetimes(1)


def test_what_was_not_asked_for_longest_is_forgotten():
    found: Recent[str, int] = Recent(2)
    found.set("a", 1)
    found.set("b", 2)
    assert found.get("a") == 1
    found.set("c", 3)
    assert (found.get("a"), found.get("b"), found.get("c"), len(found)) == (1, None, 3, 2)
