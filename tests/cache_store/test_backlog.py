import threading
import time
from collections.abc import Callable

from cache_store.backlog import Backlog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def backlog(clock: Callable[[], float], errors: list[Exception] | None = None) -> Backlog:
    return Backlog((errors if errors is not None else []).append, timer=clock)


def test_what_is_due_first_is_done_first_and_again_as_often_as_it_may():
    clock, done = Clock(), list[str]()

    def failing() -> bool:
        done.append("b")
        return False

    found = backlog(clock)
    found.add(failing, (2.0, 10.0))
    found.add(lambda: done.append("a") is None, (1.0, 10.0))
    assert not found.work()
    clock.now = 5.0
    while found.work():
        pass
    assert done == ["a", "b"] and len(found) == 1
    clock.now = 16.0
    while found.work():
        pass
    assert done == ["a", "b", "b"] and len(found) == 0
    found.close(1.0)


def test_a_task_that_raises_ends_nothing():
    errors, done = list[Exception](), threading.Event()
    found = backlog(time.monotonic, errors)

    def broken() -> bool:
        raise RuntimeError("broken")

    found.add(broken, (0.0,))
    found.add(lambda: done.set() is None, (0.05,))
    assert done.wait(5)
    assert [str(error) for error in errors] == ["broken"]
    found.close(1.0)


def test_there_is_a_bound_and_an_end():
    clock = Clock()
    found = backlog(clock)
    for _ in range(5000):
        found.add(lambda: True, (1.0,))
    assert len(found) == 4096
    found.close(1.0)
    found.add(lambda: True, (1.0,))
    assert len(found) == 0
