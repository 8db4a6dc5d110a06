"""The store put through every fault, and the servers that are full, too old or lack a command."""

import asyncio
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_process import RedisProcess

from bench.fault_cases import CASES, Bed, Case
from bench.fault_proxy import Fault, FaultProxy
from bench.fault_store import Group, StoreFaults, errors
from cache_store.breaker import State
from cache_store.ledger import Ledger
from cache_store.options import StoreOptions
from cache_store.servers import find_binary
from cache_store.shards import Shards

DEADLINE_S = 0.2
FIRST, LOST, SECOND = (f"{number:032x}" for number in (1, 2, 3))


@pytest.fixture(scope="module")
def faults() -> Iterator[StoreFaults]:
    """One store for all cases: each has to leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        server = RedisProcess(Path(folder))
        server.start()
        try:
            with FaultProxy(("127.0.0.1", server.port)) as proxy:
                found = StoreFaults(Bed(server, proxy, DEADLINE_S))
                yield found
                found.close()
        finally:
            server.kill()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_fault_gives_a_wrong_byte_or_stays(faults: StoreFaults, case: Case):
    outcome = faults.play(case, 40 if case.is_dead else 200, episodes=1)
    assert outcome.reads > 0
    assert outcome.wrong_bytes == 0
    assert outcome.recovered, "the store does not work again"
    assert faults.dead_threads == 0
    assert outcome.slowest_s < DEADLINE_S + 1.0
    assert not case.kinds or case.kinds & outcome.errors.keys()
    if case.is_dead:
        assert outcome.came == 0
        assert outcome.opened


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.02)


def opened(url: str) -> Shards:
    return Shards(StoreOptions.parse({"url": url, "timeout_s": 5.0, "breaker_cooldown_s": 0.05}))


def test_a_server_that_is_too_old_is_named(redis_process: RedisProcess):
    version = redis_process.client().info("server")["redis_version"].encode()
    old = b"5" + version[1:]
    with FaultProxy(("127.0.0.1", redis_process.port)) as proxy:
        proxy.set(Fault(replace=(b"redis_version:" + version, b"redis_version:" + old)))
        before = errors().get("too_old", 0)
        store = opened(proxy.url)
        eventually(lambda: errors().get("too_old", 0) == before + 1)
        group = Group("old", 3, 1000, 1)
        assert group.put(store)
        assert group.fetch(store) == (3, 0)
        store.close()


def test_a_command_that_a_server_lacks_costs_no_more_than_itself(redis_process: RedisProcess):
    redis_process.kill()
    redis_process.start("--rename-command", "UNLINK", "")
    store, group = opened(redis_process.unix_url), Group("poor", 4, 1000, 1)
    assert group.put(store)
    before = errors().get("refused", 0)
    for turn in range(5):
        redis_process.client().setrange(group.values[turn % 4].key, 100, b"spoilt")
        assert group.fetch(store)[1] == 0
    assert errors()["refused"] > before
    assert store.breaker_states == [State.CLOSED]
    store.close()


def test_a_disk_that_fails_refuses_writes_and_serves_reads(redis_process: RedisProcess):
    """`MISCONF`, which a server says that can't save and was told to stop then."""
    client = redis_process.client()
    store, group, late = opened(redis_process.unix_url), Group("early", 3, 1000, 1), Group("late", 3, 1000, 2)
    assert group.put(store)
    redis_process.data.rmdir()
    client.config_set("save", "1 1")
    client.set("change", "1")
    client.set("another", "1")
    eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    assert late.put(store)  # to be retried
    assert errors().get("misconf", 0) > 0
    assert group.fetch(store) == (3, 0)
    client.config_set("stop-writes-on-bgsave-error", "no")
    eventually(lambda: store.waiting == 0)
    assert late.fetch(store) == (3, 0)
    store.close()


def test_a_full_disk_under_the_ledger(tmp_path: Path):
    """What was recorded can be read, what can't be is refused, and with room again all goes on."""
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        socket = Path(folder, "l.sock")
        process = subprocess.Popen(
            [
                *(find_binary(), "--port", "0", "--unixsocket", socket, "--dir", tmp_path),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
            ],
            stdout=subprocess.DEVNULL,
            # Python ignores SIGXFSZ: a write beyond the limit is an error, as on a full disk.
            restore_signals=False,
        )
        try:
            asyncio.run(_fill(f"unix://{socket}", process.pid))
        finally:
            process.kill()
            process.wait()


async def _fill(url: str, pid: int) -> None:
    ledger = Ledger(url, deadline_s=5.0)
    until = time.monotonic() + 20
    while not await ledger.ping():
        assert time.monotonic() < until, "the ledger does not answer"
        await asyncio.sleep(0.02)
    text = {"text": random.Random(1).randbytes(10_000).hex()}
    assert await ledger.put_document("tenant", FIRST, text)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    refused = False
    until = time.monotonic() + 20
    while not refused:
        assert time.monotonic() < until, "a full disk takes all"
        refused = not await ledger.put_document("tenant", LOST, text)
        await asyncio.sleep(0.1)
    assert await ledger.documents("tenant", [FIRST]) == [text]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    until = time.monotonic() + 20
    while not await ledger.put_document("tenant", SECOND, text):
        assert time.monotonic() < until, "with room again, nothing is taken"
        await asyncio.sleep(0.1)
    assert await ledger.documents("tenant", [FIRST, SECOND]) == [text, text]
    await ledger.close()
