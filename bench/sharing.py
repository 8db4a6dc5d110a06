"""What it costs that ranks read the same pages: each for itself, or one for all through shared memory.

The ranks of tensor parallelism hold the same MLA latents, and SGLang has each of them read its own. Several
processes read the pages of one of its calls at once; or one reads them into shared memory, and all copy them
from there. Times are medians, until the slowest has all.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from bench.redis_process import RedisProcess
from cache_store.format import ValueId
from cache_store.options import StoreOptions
from cache_store.shards import Shards

PAGE_BYTES = 1_769_472  # 64 tokens of K3 in bfloat16
PAGES = 128  # one call of SGLang's
RANKS = (1, 2, 4, 8)
_ROUNDS = 5
_LIMIT_S = 60.0
_LIFE_MS = 3_600_000


def _values() -> list[ValueId]:
    return [ValueId(b"page:%d" % index, bytes(16), PAGE_BYTES) for index in range(PAGES)]


def _rank(url: str, share: str | None, barrier: Any, results: Any) -> None:
    """One rank: reads all pages into its own memory, or copies them out of `share` once they are there."""
    store = Shards(StoreOptions.parse({"url": url, "timeout_s": _LIMIT_S}))
    own = memoryview(bytearray(PAGE_BYTES * PAGES))
    memory = SharedMemory(share) if share is not None else None
    parts = [[own[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]] for at in range(PAGES)]
    for _ in range(_ROUNDS + 1):
        barrier.wait()
        started = time.perf_counter()
        if memory is None:
            assert all(store.fetch(_values(), parts, "kv", _LIFE_MS)), "not read"
        barrier.wait()
        if memory is not None:
            shared = memory.buf
            assert shared is not None, "the segment is open"
            own[:] = shared[: len(own)]
        results.put(time.perf_counter() - started)
        barrier.wait()
    if memory is not None:
        memory.close()
    store.close()


def _reader(url: str, share: str, barrier: Any, results: Any) -> None:
    """The one rank that reads, into memory that is shared."""
    store = Shards(StoreOptions.parse({"url": url, "timeout_s": _LIMIT_S}))
    memory = SharedMemory(share)
    view = memory.buf
    assert view is not None, "the segment is open"
    parts = [[view[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]] for at in range(PAGES)]
    own = memoryview(bytearray(PAGE_BYTES * PAGES))
    for _ in range(_ROUNDS + 1):
        barrier.wait()
        started = time.perf_counter()
        assert all(store.fetch(_values(), parts, "kv", _LIFE_MS)), "not read"
        barrier.wait()
        own[:] = view[: len(own)]
        results.put(time.perf_counter() - started)
        barrier.wait()
    parts.clear()
    view.release()
    memory.close()
    store.close()


def ranks(url: str, count: int, *, shared: bool) -> float:
    """Seconds until `count` ranks have the same pages: the median of what the slowest takes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    memory = SharedMemory(create=True, size=PAGE_BYTES * PAGES) if shared else None
    name = memory.name if memory is not None else None
    processes = [context.Process(target=_rank, args=(url, name, barrier, results)) for _ in range(count)]
    if name is not None:
        processes[0] = context.Process(target=_reader, args=(url, name, barrier, results))
    try:
        for process in processes:
            process.start()
        rounds = [max(results.get() for _ in range(count)) for _ in range(_ROUNDS + 1)]
        for process in processes:
            process.join(_LIMIT_S)
    finally:
        if memory is not None:
            memory.close()
            memory.unlink()
    return sorted(rounds[1:])[_ROUNDS // 2]


def sharing(folder: Path) -> dict[str, Any]:
    """Reading the same pages on every rank against reading them once."""
    server = RedisProcess(folder)
    server.start()
    found: dict[str, Any] = {"bytes": PAGE_BYTES * PAGES, "cores": os.cpu_count(), "ranks": {}}
    try:
        store = Shards(StoreOptions.parse({"url": server.unix_url, "timeout_s": _LIMIT_S}))
        page = memoryview(os.urandom(PAGE_BYTES))
        assert all(store.put(_values(), [[page]] * PAGES, "kv", _LIFE_MS)), "not stored"
        store.close()
        for transport, url in (("unix", server.unix_url), ("tcp", server.tcp_url)):
            for count in RANKS:
                each, once = (ranks(url, count, shared=shared) for shared in (False, True))
                found["ranks"][f"{transport}, {count}"] = {"each_s": round(each, 3), "once_s": round(once, 3)}
                print(
                    f"{transport}, {count} ranks: each {each:.3f} s, once and copied {once:.3f} s",
                    file=sys.stderr,
                )
    finally:
        server.kill()
    return found


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        report = sharing(Path(folder))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "each reads, s", "one reads, s", title=f"{report['bytes'] / 1e6:.0f} MB of pages")
    for name, found in report["ranks"].items():
        table.add_row(name, str(found["each_s"]), str(found["once_s"]))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
