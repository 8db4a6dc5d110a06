import pytest

from cache_store.breaker import Breaker, State


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock) -> Breaker:
    return Breaker(threshold=3, cooldown_s=1.0, max_cooldown_s=4.0, clock=clock)


def opened(clock: Clock) -> Breaker:
    found = breaker(clock)
    for _ in range(3):
        found.failed()
    assert found.state is State.OPEN
    return found


def test_it_opens_after_failures_in_a_row_only():
    found = breaker(Clock())
    for _ in range(5):
        found.failed()
        found.failed()
        found.succeeded()
    assert found.admits()
    found.failed()
    found.failed()
    assert found.admits()
    found.failed()
    assert not found.admits()


def test_no_call_is_a_probe_and_one_probe_at_a_time():
    clock = Clock()
    found = opened(clock)
    assert not found.admit_probe()
    clock.now += 1.0
    assert not found.admits()
    assert found.admit_probe()
    assert found.state is State.HALF_OPEN
    assert not found.admit_probe()
    assert not found.admits()
    found.succeeded()
    assert found.admits()


def test_failed_probes_wait_longer_each_time_and_success_forgets_it():
    clock = Clock()
    found = opened(clock)
    waits: list[float] = []
    for _ in range(4):
        started = clock.now
        while not found.admit_probe():
            clock.now += 0.25
        waits.append(clock.now - started)
        found.failed()
    assert waits == [1.0, 2.0, 4.0, 4.0]
    clock.now += 4.0
    assert found.admit_probe()
    found.succeeded()
    for _ in range(3):
        found.failed()
    clock.now += 1.0
    assert found.admit_probe()


def test_a_failure_that_cost_a_whole_deadline_opens_it_at_once():
    found = Breaker(threshold=3, clock=Clock())
    found.failed(at_once=True)
    assert found.state is State.OPEN


def test_a_call_that_began_before_it_opened_does_not_close_it():
    found = opened(Clock())
    found.succeeded()
    assert found.state is State.OPEN


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="threshold"):
        Breaker(threshold=0)
    with pytest.raises(ValueError, match="cooldown"):
        Breaker(cooldown_s=2, max_cooldown_s=1)
