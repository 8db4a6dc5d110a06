"""What may go wrong between an engine and its store, each as a block in which it does.

Faults of the network are made by `bench.fault_proxy`, those of the server by the server itself.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import redis

from bench.fault_proxy import Fault, FaultProxy
from bench.redis_process import RedisProcess

_OFTEN_S = 0.003
_FULL_BYTES = 1
_PAUSE_DEADLINES = 4


@dataclass(frozen=True, slots=True)
class Bed:
    """A server, and the proxy through which its client sees it."""

    server: RedisProcess
    proxy: FaultProxy
    deadline_s: float
    """of the client's calls"""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault.

    Attributes:
        name: of the case.
        during: the block in which the fault holds; once it ends, the server answers as ever.
        kinds: of errors, at least one of which the store's metrics must count; empty where data is only gone.
        is_dead: whether nothing at all is answered.
    """

    name: str
    during: Callable[[Bed], AbstractContextManager[None]]
    kinds: frozenset[str] = field(default_factory=frozenset[str])
    is_dead: bool = False


@contextlib.contextmanager
def _proxied(fault: Callable[[Bed], Fault], bed: Bed) -> Generator[None]:
    found = fault(bed)
    bed.proxy.set(found)
    if found.refuse:
        bed.proxy.drop()
    try:
        yield
    finally:
        bed.proxy.set(None)
        # What is still held up or half flipped must not outlive the fault.
        bed.proxy.drop()


@contextlib.contextmanager
def _stopped(bed: Bed) -> Generator[None]:
    bed.server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        bed.server.signal(signal.SIGCONT)


@contextlib.contextmanager
def _killed(bed: Bed) -> Generator[None]:
    """`kill -9`, and then a server that starts empty."""
    bed.server.kill()
    try:
        yield
    finally:
        bed.server.start()


@contextlib.contextmanager
def _paused(bed: Bed) -> Generator[None]:
    """A pause can't be ended by a client that is paused too: it ends by itself."""
    pause_s = _PAUSE_DEADLINES * bed.deadline_s
    bed.server.client().client_pause(round(1000 * pause_s))
    end = time.monotonic() + pause_s
    try:
        yield
    finally:
        time.sleep(max(0.0, end - time.monotonic()))


@contextlib.contextmanager
def _full(bed: Bed) -> Generator[None]:
    client = bed.server.client()
    before = client.config_get("maxmemory")["maxmemory"] or 0
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", _FULL_BYTES)
    try:
        yield
    finally:
        bed.server.client().config_set("maxmemory", before)


@contextlib.contextmanager
def _often(step: Callable[[redis.Redis, random.Random], object], bed: Bed) -> Generator[None]:
    """Do `step` to the server again and again."""
    stop = threading.Event()
    client, source = bed.server.client(), random.Random(5)

    def work() -> None:
        while not stop.wait(_OFTEN_S):
            with contextlib.suppress(redis.RedisError):
                step(client, source)

    thread = threading.Thread(target=work, name="fault-case", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _kill_clients(client: redis.Redis, _: random.Random) -> None:
    client.client_kill_filter(_type="normal", skipme=True)


def _flush(client: redis.Redis, _: random.Random) -> None:
    client.flushall()


def _evict(client: redis.Redis, _: random.Random) -> None:
    if key := client.randomkey():
        client.delete(key)


def _damage(client: redis.Redis, source: random.Random) -> None:
    key = client.randomkey()
    if key and client.type(key) == b"string" and (length := client.strlen(key)):
        client.setrange(key, source.randrange(length), os.urandom(1))


def _swap(client: redis.Redis, _: random.Random) -> None:
    """Two records change places, lives and all."""
    one, other = client.randomkey(), client.randomkey()
    if one and other and one != other:
        # Not one step, and need not be: an engine may look in between.
        client.rename(one, b"swapped")
        client.rename(other, one)
        client.rename(b"swapped", other)


_TIMEOUT = frozenset({"timeout"})
_LOST = frozenset({"connection", "connect"})
_SPOILT = frozenset({"damaged", "protocol", "timeout", "refused", "connection"})

CASES = (
    Case("delay", partial(_proxied, lambda _: Fault(delay_s=0.01))),
    Case("late", partial(_proxied, lambda bed: Fault(delay_s=1.5 * bed.deadline_s)), _TIMEOUT, is_dead=True),
    Case("slow", partial(_proxied, lambda _: Fault(bytes_per_s=2_000)), _TIMEOUT, is_dead=True),
    Case("cut", partial(_proxied, lambda _: Fault(cut_after=30_000)), _LOST),
    Case("reset", partial(_proxied, lambda _: Fault(cut_after=30_000, reset=True)), _LOST),
    Case("refused", partial(_proxied, lambda _: Fault(refuse=True)), _LOST, is_dead=True),
    Case("blackhole", partial(_proxied, lambda _: Fault(blackhole=True)), _TIMEOUT, is_dead=True),
    Case("flipped_replies", partial(_proxied, lambda _: Fault(flip_replies=30_000)), _SPOILT),
    Case("flipped_requests", partial(_proxied, lambda _: Fault(flip_requests=500)), _SPOILT),
    Case("killed", _killed, _LOST, is_dead=True),
    Case("stopped", _stopped, _TIMEOUT, is_dead=True),
    Case("clients_killed", partial(_often, _kill_clients), _LOST),
    Case("paused", _paused, _TIMEOUT, is_dead=True),
    Case("full", _full, frozenset({"oom"})),
    Case("flushed", partial(_often, _flush)),
    Case("evicted", partial(_often, _evict)),
    Case("damaged", partial(_often, _damage), frozenset({"damaged"})),
    Case("swapped", partial(_often, _swap), frozenset({"damaged"})),
)
