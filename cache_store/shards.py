"""Several servers as one store: each value lies on the one that rendezvous hashing gives it.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998): a key belongs to the server
for which the hash of both is largest. So a server that is added or taken away moves its own share of the keys
and no others, and no engine has to know more than the list. A server is known by its host and port (or path)
and its database: engines that share a store must name its servers alike, and may list them in any order.

Each server has a breaker, a retry queue and a thread of its own (`cache_store.values`): one that is down is a
miss for its own keys. They are asked at the same time, so all together take no longer than one deadline.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import xxhash

from cache_store import life, metrics
from cache_store.breaker import State
from cache_store.format import Segments, ValueId
from cache_store.life import Life
from cache_store.options import StoreOptions
from cache_store.stream import Endpoint
from cache_store.values import ValueStore

_T = TypeVar("_T")

# SGLang has four threads in the store at a time: lookup, read, write, and the scheduler's own.
_CALLERS = 4


class Shards:
    """Reads, writes and finds values on the servers of `options.urls`. Thread-safe; close it in the end."""

    def __init__(self, options: StoreOptions) -> None:
        endpoints = [Endpoint.parse(url) for url in options.urls]
        self._seeds = [_seed(endpoint) for endpoint in endpoints]
        # Failed writes may take as much memory as one server's would.
        share = options.retry_bytes // len(endpoints)
        self._stores = [
            ValueStore(options.model_copy(update={"url": url, "retry_bytes": share})) for url in options.urls
        ]
        self._threads = ThreadPoolExecutor(
            max_workers=_CALLERS * len(endpoints), thread_name_prefix="longhaul-shard"
        )
        self.faults = metrics.Faults()
        """Where faults of the caller's own are counted and logged."""

    def __str__(self) -> str:
        return ", ".join(map(str, self._stores))

    @property
    def breaker_states(self) -> list[State]:
        """Of each server, whether it is asked at present."""
        return [store.breaker_state for store in self._stores]

    @property
    def waiting(self) -> int:
        """Number of failed writes that wait for another try."""
        return sum(store.waiting for store in self._stores)

    def shard_of(self, key: bytes) -> int:
        """Which of the servers, in the order of the options, has the value of `key`."""
        scores = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return scores.index(max(scores))

    def find(self, keys: Sequence[bytes], record_bytes: Sequence[int]) -> list[bool]:
        """Under which keys there is a value whose record has the given length, in one round trip."""
        return self._merged(keys, lambda store, at: store.find(_at(at, keys), _at(at, record_bytes)))

    def fetch(
        self, values: Sequence[ValueId], targets: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        """Read each value's payload into its target: `ValueStore.fetch`."""
        return self._moved(ValueStore.fetch, values, targets, pool, life_ms)

    def put(
        self, values: Sequence[ValueId], payloads: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        """Write each value that is not there yet: `ValueStore.put`."""
        return self._moved(ValueStore.put, values, payloads, pool, life_ms)

    def record(self, key: bytes, length: int) -> bytes | None:
        """What is under `key`, if it has that length: `ValueStore.record`."""
        return self._stores[self.shard_of(key)].record(key, length)

    def prolong(self, values: Sequence[ValueId], life_ms: Life) -> bool:
        """Let each value that exists live for `life_ms` at least; False after a fault of any server."""
        lives = life.each(life_ms, len(values))
        done = self._each(
            [value.key for value in values],
            lambda store, at: store.prolong(_at(at, values), _at(at, lives)),
        )
        return all(ok for _, ok in done)

    def shorten(self, values: Sequence[ValueId], life_ms: Life) -> int:
        """Let each value that exists live for `life_ms` at most; returns how many would have lived longer."""
        lives = life.each(life_ms, len(values))
        counts = self._each(
            [value.key for value in values],
            lambda store, at: store.shorten(_at(at, values), _at(at, lives)),
        )
        return sum(count for _, count in counts)

    def integers(self, commands: Sequence[Sequence[bytes]]) -> list[int] | None:
        """The replies to commands that answer with an integer; None after a fault of any server.

        The second word of each command is its key.
        """
        replies = [0] * len(commands)
        for at, answers in self._each(
            [command[1] for command in commands], lambda store, at: store.integers(_at(at, commands))
        ):
            if answers is None:
                return None
            for i, answer in zip(at, answers, strict=True):
                replies[i] = answer
        return replies

    def clear(self, prefix: bytes) -> bool:
        """Remove every key that begins with `prefix`; False if a server failed on the way."""
        return all(self._all(lambda store: store.clear(prefix)))

    def close(self) -> None:
        """Write what waits for a retry, for as long as the options grant, and close all connections."""
        try:
            self._all(ValueStore.close)
        except RuntimeError:  # an interpreter that ends starts no threads: one after another
            for store in self._stores:
                store.close()
        self._threads.shutdown()

    def _moved(
        self,
        move: Callable[[ValueStore, Sequence[ValueId], Sequence[Segments], str, Life], list[bool]],
        values: Sequence[ValueId],
        memory: Sequence[Segments],
        pool: str,
        life_ms: Life,
    ) -> list[bool]:
        lives = life.each(life_ms, len(values))
        return self._merged(
            [value.key for value in values],
            lambda store, at: move(store, _at(at, values), _at(at, memory), pool, _at(at, lives)),
        )

    def _merged(
        self, keys: Sequence[bytes], work: Callable[[ValueStore, Sequence[int]], list[bool]]
    ) -> list[bool]:
        merged = [False] * len(keys)
        for at, found in self._each(keys, work):
            for i, ok in zip(at, found, strict=True):
                merged[i] = ok
        return merged

    def _each(
        self, keys: Sequence[bytes], work: Callable[[ValueStore, Sequence[int]], _T]
    ) -> list[tuple[Sequence[int], _T]]:
        """Do `work` with each server and the positions of its keys, all at the same time."""
        if len(self._stores) == 1:
            at = range(len(keys))
            return [(at, work(self._stores[0], at))]
        shares: dict[int, list[int]] = {}
        for i, key in enumerate(keys):
            shares.setdefault(self.shard_of(key), []).append(i)
        jobs = [(at, self._threads.submit(work, self._stores[shard], at)) for shard, at in shares.items()]
        # All of them, also when one raises: they write into memory that is the caller's again after this.
        wait(job for _, job in jobs)
        return [(at, job.result()) for at, job in jobs]

    def _all(self, work: Callable[[ValueStore], _T]) -> list[_T]:
        jobs = [self._threads.submit(work, store) for store in self._stores]
        wait(jobs)
        return [job.result() for job in jobs]


def _at(positions: Sequence[int], items: Sequence[_T]) -> Sequence[_T]:
    return items if isinstance(positions, range) else [items[i] for i in positions]


def _seed(endpoint: Endpoint) -> int:
    return xxhash.xxh3_64_intdigest(f"{endpoint}/{endpoint.database}".encode())
