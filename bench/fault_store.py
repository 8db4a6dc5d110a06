"""The store alone under faults: what it reads is compared byte by byte with what was written."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import REGISTRY

from bench.fault_cases import CASES, Bed, Case
from cache_store.breaker import State
from cache_store.format import CHUNK_BYTES, ValueId
from cache_store.options import StoreOptions
from cache_store.shards import Shards

_T = TypeVar("_T")

SPACE = bytes(range(16))
POOL = "kv"
_LIFE_MS = 600_000
_RECOVERY_LIMIT_S = 20.0
_CASE_LIMIT_S = 12.0
_MIN_EPISODES = 6
_POLL_S = 0.01
_DEAD_SHARE = 3


class Group:
    """Values that are read together."""

    def __init__(self, name: str, count: int, length: int, seed: int) -> None:
        source = random.Random(seed)
        self.values = [ValueId(f"{name}:{index}".encode(), SPACE, length) for index in range(count)]
        self._payloads = [source.randbytes(length) for _ in range(count)]
        self._targets = [bytearray(length) for _ in range(count)]

    def put(self, store: Shards) -> bool:
        """Write all; whether all are stored, or will be."""
        return all(store.put(self.values, [[memoryview(p)] for p in self._payloads], POOL, _LIFE_MS))

    def fetch(self, store: Shards) -> tuple[int, int]:
        """Read all; how many came, and how many bytes of those are wrong."""
        for target in self._targets:
            target[:] = bytes(len(target))
        # In uneven parts, as the components of a state are.
        cuts = [len(target) // 3 for target in self._targets]
        parts = [
            [memoryview(target)[:at], memoryview(target)[at:]]
            for target, at in zip(self._targets, cuts, strict=True)
        ]
        done = store.fetch(self.values, parts, POOL, _LIFE_MS)
        wrong = sum(
            sum(a != b for a, b in zip(target, payload, strict=True))
            for ok, target, payload in zip(done, self._targets, self._payloads, strict=True)
            if ok and bytes(target) != payload
        )
        return sum(done), wrong


@dataclass(slots=True)
class Outcome:
    """What one case did to the store.

    Attributes:
        reads: values asked for while the fault held, without those that an open breaker refused.
        came: how many of those were read.
        wrong_bytes: in values that were read.
        errors: counted meanwhile, by kind.
        opened: whether the breaker opened.
        recovered: whether all could be written and read again after each time.
        slowest_s: the longest call.
    """

    reads: int = 0
    came: int = 0
    wrong_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict[str, int])
    opened: bool = False
    recovered: bool = True
    slowest_s: float = 0.0


class StoreFaults:
    """Plays every case against one store, whose threads have to live through all of them."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._store = Shards(
            StoreOptions.parse(
                {"url": bed.proxy.url, "timeout_s": bed.deadline_s, "breaker_cooldown_s": 0.05}
            )
        )
        # B is asked between two times A, so that a reply that comes too late would be taken for another's.
        self._a, self._b = Group("a", 20, 2_000, 1), Group("b", 20, 20_000, 2)
        self._large = Group("large", 1, CHUNK_BYTES + 9, 3)
        self._random = random.Random(4)
        self._fresh = 0
        self._threads = _threads()

    def play(self, case: Case, reads: int, *, episodes: int = _MIN_EPISODES) -> Outcome:
        """Put the store through `case` until `reads` values were asked for.

        It takes some seconds at most, or as long as `episodes` times take.
        """
        outcome = Outcome()
        before = errors()
        end = time.monotonic() + _CASE_LIMIT_S
        played = 0
        self._recover(outcome)
        while outcome.reads < reads and (time.monotonic() < end or played < episodes):
            with case.during(self._bed):
                if case.is_dead:
                    self._episode(outcome)
                else:
                    self._spell(outcome, min(outcome.reads + reads // 3, reads), end)
            played += 1
            self._recover(outcome)
        outcome.errors = {kind: count - before.get(kind, 0) for kind, count in errors().items()}
        outcome.errors = {kind: count for kind, count in outcome.errors.items() if count}
        return outcome

    @property
    def dead_threads(self) -> int:
        """How many of the store's threads have ended."""
        return len(self._threads - _threads())

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _episode(self, outcome: Outcome) -> None:
        """A write and some reads, of which the first finds out that nobody answers."""
        for group in (self._a, self._b, self._a):
            self._read(outcome, group)
        self._write(outcome)

    def _spell(self, outcome: Outcome, reads: int, end: float) -> None:
        """Reads and writes in turns, for as long as the fault leaves something to read."""
        while outcome.reads < reads and time.monotonic() < end:
            for group in (self._a, self._b, self._a):
                self._read(outcome, group)
            chance = self._random.random()
            if chance < 0.1:
                self._timed(outcome, lambda: self._large.put(self._store))
                self._read(outcome, self._large)
            elif chance < 0.5:
                self._write(outcome)
                self._timed(outcome, lambda: self._a.put(self._store))
                self._timed(outcome, lambda: self._b.put(self._store))
            if self._store.breaker_states != [State.CLOSED]:
                time.sleep(_POLL_S)

    def _read(self, outcome: Outcome, group: Group) -> None:
        refused = errors().get("breaker_open", 0)
        came, wrong = self._timed(outcome, lambda: group.fetch(self._store))
        outcome.wrong_bytes += wrong
        if errors().get("breaker_open", 0) == refused:
            outcome.reads += len(group.values)
            outcome.came += came

    def _write(self, outcome: Outcome) -> None:
        """Values that nobody wrote before, which are read back right now."""
        self._fresh += 1
        group = Group(f"fresh{self._fresh}", 5, 3_000, 100 + self._fresh)
        self._timed(outcome, lambda: group.put(self._store))
        self._read(outcome, group)

    def _timed(self, outcome: Outcome, work: Callable[[], _T]) -> _T:
        started = time.monotonic()
        result = work()
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - started)
        outcome.opened |= self._store.breaker_states != [State.CLOSED]
        return result

    def _recover(self, outcome: Outcome) -> None:
        """Wait until everything can be written and read again."""
        end = time.monotonic() + _RECOVERY_LIMIT_S
        groups = (self._a, self._b, self._large)
        while time.monotonic() < end:
            if self._store.breaker_states == [State.CLOSED] and not self._store.waiting:
                whole = all(group.put(self._store) for group in groups)
                found = [group.fetch(self._store) for group in groups]
                outcome.wrong_bytes += sum(wrong for _, wrong in found)
                if whole and [came for came, _ in found] == [len(group.values) for group in groups]:
                    return
            time.sleep(_POLL_S)
        outcome.recovered = False


def errors() -> dict[str, int]:
    """The store's errors so far, by kind."""
    return {
        sample.labels["kind"]: int(sample.value)
        for metric in REGISTRY.collect()
        if metric.name == "longhaul_store_errors"
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "longhaul-store"}


def measure(bed: Bed, reads: int, said: Callable[[str], None]) -> dict[str, Any]:
    """Play all cases; returns the report."""
    faults = StoreFaults(bed)
    outcomes: dict[str, Outcome] = {}
    try:
        # Those that stall are asked less: the others make up for it.
        for case in sorted(CASES, key=lambda case: not case.is_dead):
            done = sum(outcome.reads for outcome in outcomes.values())
            share = (reads - done) // (len(CASES) - len(outcomes)) + 1
            if case.is_dead:
                share //= _DEAD_SHARE
            outcome = outcomes[case.name] = faults.play(case, share)
            said(
                f"store, {case.name}: {outcome.reads} reads, {outcome.came} came, "
                f"{outcome.wrong_bytes} bytes wrong, errors {outcome.errors}"
            )
        dead = faults.dead_threads
    finally:
        faults.close()
    return {
        "reads": sum(outcome.reads for outcome in outcomes.values()),
        "wrong_bytes": sum(outcome.wrong_bytes for outcome in outcomes.values()),
        "dead_threads": dead,
        "unrecovered": [name for name, outcome in outcomes.items() if not outcome.recovered],
        "unnamed": [
            case.name for case in CASES if case.kinds and not case.kinds & outcomes[case.name].errors.keys()
        ],
        "slowest_call_ms": round(1000 * max(outcome.slowest_s for outcome in outcomes.values())),
        "breaker_opened": [name for name, outcome in outcomes.items() if outcome.opened],
        "cases": {
            name: {"reads": outcome.reads, "came": outcome.came, "errors": outcome.errors}
            for name, outcome in outcomes.items()
        },
    }
