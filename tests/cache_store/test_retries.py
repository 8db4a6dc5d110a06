from cache_store.format import ValueId
from cache_store.retries import RetryQueue


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def value(name: str, length: int) -> ValueId:
    return ValueId(name.encode(), bytes(16), length)


def queue(clock: Clock, max_bytes: int = 100, attempts: int = 3) -> RetryQueue:
    return RetryQueue(max_bytes=max_bytes, max_attempts=attempts, clock=clock)


def offer(found: RetryQueue, name: str, length: int) -> bool:
    return found.offer(value(name, length), [memoryview(bytes(length))], "kv", 1000)


def key(found: RetryQueue) -> bytes | None:
    write = found.due()
    return write.value.key if write else None


def test_oldest_first_and_a_bound():
    found = queue(Clock())
    assert offer(found, "a", 60)
    assert offer(found, "b", 40)
    assert not offer(found, "c", 1)
    assert key(found) == b"a"
    found.written()
    assert key(found) == b"b"
    assert offer(found, "c", 60)
    found.written()
    assert key(found) == b"c"
    found.written()
    assert key(found) is None
    assert len(found) == 0


def test_a_copy_is_kept():
    memory = bytearray(b"page")
    found = queue(Clock())
    found.offer(value("a", 4), [memoryview(memory)[:2], memoryview(memory)[2:]], "kv", 1000)
    memory[:] = b"gone"
    write = found.due()
    assert write is not None and write.payload == b"page"


def test_failures_wait_and_in_the_end_give_up():
    clock = Clock()
    found = queue(clock)
    offer(found, "a", 10)
    offer(found, "b", 10)
    found.failed()
    assert found.due() is None
    clock.now += 0.5
    assert key(found) == b"a"
    found.failed()
    clock.now += 0.5
    assert found.due() is None
    clock.now += 0.5
    assert key(found) == b"a"
    found.failed()
    clock.now += 10
    assert key(found) == b"b"


def test_abandoning_empties_it():
    found = queue(Clock())
    offer(found, "a", 60)
    assert found.abandon() == 1
    assert found.due() is None
    assert offer(found, "b", 100)
