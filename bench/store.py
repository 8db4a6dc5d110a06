"""How fast values move to and from Redis: our client, redis-py with hiredis, and a bare socket as the limit.

All three move the same bytes in the same batches, over TCP and over a unix socket, in turns, so that what
else the machine does falls on all of them; the figures are medians. `values` is the store as the engine uses
it, with checksums computed and checked. CPU is that of both ends. SGLang's file backend moves the same bytes
too, which its files' page cache takes: on a tmpfs, and on the disk of the state directory.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from bench.redis_process import RedisProcess
from cache_store.format import ValueId
from cache_store.options import StoreOptions
from cache_store.stream import SOCKET_BUFFER_BYTES, Deadline
from cache_store.values import ValueStore
from cache_store.wire import BlobClient
from model.state import state_directory

KIB, MIB = 1 << 10, 1 << 20
SIZES_KIB = (64, 256, 1024, 4096, 32_768)
SUMMARY_KIB = (1024, 4096)  # what pages and chunks of states are
BATCH_BYTES = 64 * MIB
BATCH_VALUES = 128  # SGLang's own batch of pages
LOOKUP_KEYS = 4438  # KV and states of a session of 142,016 tokens
SPACE = bytes(16)
_TTL_MS = 600_000
_LIMIT_S = 120.0


@dataclass(slots=True)
class Series:
    """Repeated measurements of one way to move one batch."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def report(self, moved: int) -> dict[str, float]:
        """Medians."""
        return {
            "gb_per_s": round(moved / 1e9 / statistics.median(self.seconds), 3),
            "cpu_s_per_gb": round(statistics.median(self.cpu_seconds) / (moved / 1e9), 3),
        }


@contextlib.contextmanager
def server(folder: Path) -> Generator[tuple[dict[str, str], psutil.Process]]:
    """A Redis without persistence; its URLs by transport, and its process."""
    found = RedisProcess(folder)
    found.start()
    try:
        yield {"tcp": f"{found.tcp_url}/0", "unix": found.unix_url}, psutil.Process(found.pid)
    finally:
        found.kill()


def _bare_peer(family: int, address: Any, ready: Any) -> None:
    """The other end of the bare socket: sends or takes what it is told to."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if family == socket.AF_INET:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen()
    ready.send(listener.getsockname())
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(32 * MIB))
    while order := connection.recv(17, socket.MSG_WAITALL):
        size, count = int.from_bytes(order[1:9], "little"), int.from_bytes(order[9:], "little")
        for _ in range(count):
            if order[:1] == b"G":
                connection.sendall(buffer[:size])
            else:
                connection.recv_into(buffer[:size], size, socket.MSG_WAITALL)
        if order[:1] == b"S":
            connection.sendall(b"k")


class BareSocket:
    """A process that only moves bytes: what no client of a server can exceed."""

    def __init__(self, transport: str, folder: Path) -> None:
        family = socket.AF_UNIX if transport == "unix" else socket.AF_INET
        address: Any = str(folder / "bare.sock") if transport == "unix" else ("127.0.0.1", 0)
        here, there = multiprocessing.Pipe()
        self._peer = multiprocessing.get_context("spawn").Process(
            target=_bare_peer, args=(family, address, there), daemon=True
        )
        self._peer.start()
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._socket.connect(here.recv())
        assert self._peer.pid is not None
        self.process = psutil.Process(self._peer.pid)

    def get(self, targets: list[memoryview]) -> None:
        """Receive as many values as there are targets."""
        self._order(b"G", targets)
        for target in targets:
            self._socket.recv_into(target, len(target), socket.MSG_WAITALL)

    def set(self, values: list[memoryview]) -> None:
        """Send the values, and wait until all have arrived."""
        self._order(b"S", values)
        for value in values:
            self._socket.sendall(value)
        self._socket.recv(1)

    def _order(self, what: bytes, values: list[memoryview]) -> None:
        size, count = len(values[0]), len(values)
        self._socket.sendall(what + size.to_bytes(8, "little") + count.to_bytes(8, "little"))

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        self._peer.join(5)


class FileBackend:
    """SGLang's own storage backend for files, without the copies that an engine makes for it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self._folder = folder
        self._torch = torch
        self._files = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=True,
                enable_storage_metrics=False,
                is_page_first_layout=True,
                model_name="bench",
            ),
            str(folder),
        )

    def move(self, size: int, rounds: int) -> dict[str, dict[str, float]]:
        """GET and SET of values of `size` bytes."""
        count = max(2, min(BATCH_VALUES, BATCH_BYTES // size))
        source = self._torch.frombuffer(bytearray(os.urandom(size)), dtype=self._torch.uint8)
        targets = [self._torch.zeros(size, dtype=self._torch.uint8) for _ in range(count)]
        series = {"set": Series(), "get": Series()}
        for turn in range(rounds + 1):
            # A file that exists is not written again.
            self._files.clear()
            keys = [f"{size}-{turn}-{index}" for index in range(count)]
            for direction in series:
                cpu, started = time.process_time(), time.perf_counter()
                if direction == "set":
                    assert self._files.batch_set(keys, [source] * count), "not stored"
                else:
                    assert all(found is not None for found in self._files.batch_get(keys, targets)), (
                        "not read"
                    )
                seconds = time.perf_counter() - started
                if turn:
                    series[direction].seconds.append(seconds)
                    series[direction].cpu_seconds.append(time.process_time() - cpu)
        assert self._torch.equal(targets[-1], source), "what came back is not what was written"
        return {direction: found.report(size * count) for direction, found in series.items()}


def _cpu(*processes: psutil.Process) -> float:
    return time.process_time() + sum(
        times.user + times.system for times in (process.cpu_times() for process in processes)
    )


class Bench:
    """One transport to one server."""

    def __init__(self, transport: str, url: str, process: psutil.Process, folder: Path, rounds: int) -> None:
        self._process = process
        self._rounds = rounds
        self._blobs = BlobClient(url)
        self._plain = redis.Redis.from_url(url)
        self._store = ValueStore(StoreOptions.parse({"url": url, "timeout_s": _LIMIT_S}))
        self._bare = BareSocket(transport, folder)

    def close(self) -> None:
        """Close all clients."""
        self._bare.close()
        self._store.close()
        self._plain.close()
        self._blobs.close()

    def move(self, size: int) -> dict[str, dict[str, dict[str, float]]]:
        """GET and SET of values of `size` bytes, by client."""
        count = max(2, min(BATCH_VALUES, BATCH_BYTES // size))
        keys = [b"value:%d:%d" % (size, index) for index in range(count)]
        ids = [ValueId(b"checked:%d:%d" % (size, index), SPACE, size) for index in range(count)]
        source = memoryview(os.urandom(size))
        targets = [memoryview(bytearray(size)) for _ in range(count)]
        values = [source] * count
        ways: dict[str, dict[str, Callable[[], None]]] = {
            "set": {
                "bare": lambda: self._bare.set(values),
                "ours": lambda: self._set(keys, source),
                "redis_py": lambda: self._redis_py_set(keys, bytes(source)),
                "values": lambda: self._put(ids, source),
            },
            "get": {
                "bare": lambda: self._bare.get(targets),
                "ours": lambda: self._get(keys, targets),
                "redis_py": lambda: self._redis_py_get(keys),
                "values": lambda: self._fetch(ids, targets),
            },
        }
        report: dict[str, dict[str, dict[str, float]]] = {}
        for direction, clients in ways.items():
            series = {name: Series() for name in clients}
            for turn in range(self._rounds + 1):
                for name, work in clients.items():
                    if direction == "set" and name == "values":
                        self._plain.delete(*self._plain.keys("checked:*") or [b"none"])
                    peer = self._bare.process if name == "bare" else self._process
                    cpu, started = _cpu(peer), time.perf_counter()
                    work()
                    seconds = time.perf_counter() - started
                    if turn:  # the first warms up
                        series[name].seconds.append(seconds)
                        series[name].cpu_seconds.append(_cpu(peer) - cpu)
            report[direction] = {name: found.report(size * count) for name, found in series.items()}
        assert targets[-1] == source, "what came back is not what was written"
        self._plain.flushall()
        return report

    def look_up(self) -> dict[str, float]:
        """Milliseconds to find out which of a session's keys exist."""
        keys = [b"lh1:0123456789abcdef:kv:%b" % os.urandom(32).hex().encode() for _ in range(LOOKUP_KEYS)]
        for key in keys[::2]:
            self._plain.set(key, b"x" * 100)
        ours, theirs = Series(), Series()
        for _ in range(2 * self._rounds):
            started = time.perf_counter()
            with self._blobs.connection(Deadline(_LIMIT_S)) as connection:
                found = [length > 0 for length in connection.lengths(keys)]
            ours.seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            pipeline = self._plain.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(key)
            answers = [bool(answer) for answer in pipeline.execute()]
            theirs.seconds.append(time.perf_counter() - started)
            assert found == answers, "the clients disagree about what exists"
        self._plain.flushall()
        return {
            "ours_ms": round(1000 * statistics.median(ours.seconds), 2),
            "redis_py_ms": round(1000 * statistics.median(theirs.seconds), 2),
        }

    def _set(self, keys: list[bytes], value: memoryview) -> None:
        with self._blobs.connection(Deadline(_LIMIT_S)) as connection:
            assert not any(connection.write([(key, [value]) for key in keys], _TTL_MS)), "refused"

    def _get(self, keys: list[bytes], targets: list[memoryview]) -> None:
        with self._blobs.connection(Deadline(_LIMIT_S)) as connection:
            statuses = list(connection.read(keys, [[target] for target in targets]))
        assert all(status.value == "read" for status in statuses), "a value is missing"

    def _put(self, ids: list[ValueId], value: memoryview) -> None:
        assert all(self._store.put(ids, [[value]] * len(ids), "kv", _TTL_MS)), "not stored"

    def _fetch(self, ids: list[ValueId], targets: list[memoryview]) -> None:
        assert all(self._store.fetch(ids, [[target] for target in targets], "kv", _TTL_MS)), "not read"

    def _redis_py_set(self, keys: list[bytes], value: bytes) -> None:
        pipeline = self._plain.pipeline(transaction=False)
        for key in keys:
            pipeline.set(key, value, px=_TTL_MS)
        pipeline.execute()

    def _redis_py_get(self, keys: list[bytes]) -> None:
        pipeline = self._plain.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        pipeline.execute()


def _lowest(rows: Iterator[tuple[float, float]]) -> float | None:
    return round(min((ours / theirs for ours, theirs in rows), default=0.0), 2) or None


def summary(report: dict[str, Any]) -> dict[str, float | None]:
    """The worst ratios over both transports: of transfers at 1 and 4 MiB, and of lookups."""

    def rows(direction: str, client: str) -> Iterator[tuple[float, float]]:
        for found in report.values():
            for size in SUMMARY_KIB:
                if moved := found["kib"].get(str(size)):
                    yield moved[direction]["ours"]["gb_per_s"], moved[direction][client]["gb_per_s"]

    return {
        "get_vs_socket": _lowest(rows("get", "bare")),
        "set_vs_socket": _lowest(rows("set", "bare")),
        "get_vs_redis_py": _lowest(rows("get", "redis_py")),
        "set_vs_redis_py": _lowest(rows("set", "redis_py")),
        "lookup_vs_redis_py": _lowest(
            (found["lookup"]["redis_py_ms"], found["lookup"]["ours_ms"]) for found in report.values()
        ),
    }


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each figure (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES_KIB, metavar="KIB", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give at least 1")
    if not all(1 <= size <= 32_768 for size in args.sizes):
        parser.error(f"--sizes {args.sizes}: give sizes of 1 to 32768 KiB")
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lhbench") as folder, server(Path(folder)) as (urls, process):
        for transport, url in urls.items():
            bench = Bench(transport, url, process, Path(folder), args.rounds)
            try:
                sizes: dict[str, Any] = {}
                for size in args.sizes:
                    sizes[str(size)] = bench.move(size * KIB)
                    print(f"{transport}: {size} KiB measured", file=sys.stderr)
                report[transport] = {"kib": sizes, "lookup": bench.look_up()}
            finally:
                bench.close()
    files: dict[str, Any] = {}
    for name, parent in (("tmpfs", Path("/dev/shm")), ("disk", state_directory())):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="lhbench", dir=parent) as folder:
            backend = FileBackend(Path(folder))
            files[name] = {str(size): backend.move(size * KIB, args.rounds) for size in args.sizes}
        print(f"files on {name} measured", file=sys.stderr)
    if args.json:
        print(json.dumps({**summary(report), "transports": report, "files": files}))
    else:
        _show(report, files)
    return 0


def _show(report: dict[str, Any], files: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for transport, found in report.items():
        table = Table(
            "KiB",
            "",
            "bare",
            "ours",
            "values",
            "redis-py",
            title=f"GB/s (CPU s/GB of both ends), {transport}",
        )
        for size, moved in found["kib"].items():
            for direction, clients in moved.items():
                cells = [
                    f"{clients[name]['gb_per_s']:.2f} ({clients[name]['cpu_s_per_gb']:.2f})"
                    for name in ("bare", "ours", "values", "redis_py")
                ]
                table.add_row(size, direction, *cells)
        console.print(table)
        lookup = found["lookup"]
        console.print(
            f"lookup of {LOOKUP_KEYS} keys: {lookup['ours_ms']} ms, redis-py {lookup['redis_py_ms']} ms\n"
        )
    table = Table("KiB", "", *files, title="GB/s (CPU s/GB), SGLang's file backend")
    for size in next(iter(files.values())):
        for direction in ("set", "get"):
            found = [moved[size][direction] for moved in files.values()]
            cells = [f"{one['gb_per_s']:.2f} ({one['cpu_s_per_gb']:.2f})" for one in found]
            table.add_row(size, direction, *cells)
    console.print(table)
    console.print(" ".join(f"{name}={value}" for name, value in summary(report).items()))


if __name__ == "__main__":
    sys.exit(main())
