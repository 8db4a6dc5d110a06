"""What it costs that ranks read the same pages: each all of them, or each its part, shared through memory.

The ranks of tensor parallelism hold the same MLA latents, and SGLang has each of them read its own. Several
processes read the pages of one of its calls at once, with `cache_store.siblings` and without. Times are
medians, until the slowest has all.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.redis_process import RedisProcess
from cache_store.format import ValueId
from cache_store.options import StoreOptions
from cache_store.shards import Shards
from cache_store.siblings import Siblings

PAGE_BYTES = 1_769_472  # 64 tokens of K3 in bfloat16
PAGES = 128  # one call of SGLang's
RANKS = (2, 4, 8)
_ROUNDS = 5
_LIMIT_S = 60.0
_LIFE_MS = 3_600_000
_SHARE_BYTES = 512 << 20
_CALLS = 2


def _values(turn: int) -> list[ValueId]:
    """Other pages each time, as a session's calls ask for."""
    first = turn % _CALLS * PAGES
    return [ValueId(b"page:%d" % index, bytes(16), PAGE_BYTES) for index in range(first, first + PAGES)]


def _rank(url: str, rank: int, name: str | None, barrier: Any, results: Any) -> None:
    """One rank: reads all pages itself, or its part of them and the rest from the others."""
    store = Shards(StoreOptions.parse({"url": url, "timeout_s": _LIMIT_S}))
    reader = Siblings(store, name, rank, PAGE_BYTES, _SHARE_BYTES, _LIMIT_S) if name else store
    own = memoryview(bytearray(PAGE_BYTES * PAGES))
    parts = [[own[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]] for at in range(PAGES)]
    for turn in range(_ROUNDS + 1):
        barrier.wait()
        started = time.perf_counter()
        assert all(reader.fetch(_values(turn), parts, "kv", _LIFE_MS)), "not read"
        results.put(time.perf_counter() - started)
    barrier.wait()
    if isinstance(reader, Siblings):
        reader.close()
    store.close()


def ranks(url: str, count: int, *, shared: bool) -> float:
    """Seconds until `count` ranks have the same pages: the median of what the slowest takes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    name = f"bench{count}" if shared else None
    processes = [
        context.Process(target=_rank, args=(url, rank, name, barrier, results)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    rounds = [max(results.get(timeout=_LIMIT_S) for _ in range(count)) for _ in range(_ROUNDS + 1)]
    for process in processes:
        process.join(_LIMIT_S)
    return statistics.median(rounds[1:])


def measure(folder: Path) -> dict[str, Any]:
    """Reading the same pages on every rank against reading them once."""
    server = RedisProcess(folder)
    server.start()
    found: dict[str, Any] = {"bytes": PAGE_BYTES * PAGES, "cores": os.cpu_count(), "ranks": {}}
    try:
        store = Shards(StoreOptions.parse({"url": server.unix_url, "timeout_s": _LIMIT_S}))
        page = memoryview(os.urandom(PAGE_BYTES))
        for turn in range(_CALLS):
            assert all(store.put(_values(turn), [[page]] * PAGES, "kv", _LIFE_MS)), "not stored"
        store.close()
        for transport, url in (("unix", server.unix_url), ("tcp", server.tcp_url)):
            for count in RANKS:
                alone, shared = (ranks(url, count, shared=sharing) for sharing in (False, True))
                found["ranks"][f"{transport}, {count}"] = {
                    "each_s": round(alone, 3),
                    "shared_s": round(shared, 3),
                }
                print(
                    f"{transport}, {count} ranks: each all {alone:.3f} s, each its part {shared:.3f} s",
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
        report = measure(Path(folder))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "each reads all, s", "each reads its part, s", title=f"{report['bytes'] / 1e6:.0f} MB of pages"
    )
    for name, found in report["ranks"].items():
        table.add_row(name, str(found["each_s"]), str(found["shared_s"]))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
