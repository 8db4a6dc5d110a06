"""Pages that all ranks of tensor parallelism hold alike, read once per host rather than once per rank.

The latent pages of MLA are the same on every rank, and SGLang has each rank read all of them. Here each rank
that reads a span reads its own part of it from the server, leaves that in memory that the ranks of one engine
on one host share, and takes the other parts from there. What does not come soon it reads itself.

The shared memory is a guess, never the truth: a rank takes a page only if header and payload, once copied,
are the record that the server would have to hold (`cache_store.format`). So no lock is needed, and a torn,
stale or foreign slot is a page read from the server.

Layout: one page of memory with the process id of each rank, 8 bytes each; then slots of a header's page and
the payload.
"""

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from cache_store import format, life
from cache_store.format import HEADER_BYTES, Segments, ValueId
from cache_store.life import Life
from cache_store.shards import Shards

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
CALL_PAGES = 128  # of one call of SGLang's
_NAME = "longhaul-pages"
_ROSTER_BYTES = 4096
_MAX_RANKS = _ROSTER_BYTES // 8
_HEADER_ROOM = 4096
# A rank waits for the others' parts for as long as its own took, and as much again.
_PATIENCE = 2.0
_MIN_PATIENCE_S = 0.005
_POLL_S = 0.0005


class Siblings:
    """One rank's view of the memory that it shares with the other ranks of its engine on this host.

    One thread at a time may `fetch`: SGLang reads in one.
    """

    def __init__(
        self, values: Shards, name: str, rank: int, page_bytes: int, share_bytes: int, timeout_s: float
    ) -> None:
        """Open the memory, or make it: `name` is the same for all ranks that share.

        Raises:
            OSError: there is not as much shared memory.
        """
        assert 0 <= rank < _MAX_RANKS, f"rank {rank}"
        self._values = values
        self._rank = rank
        self._timeout_s = timeout_s
        self._stride = _HEADER_ROOM + -(-page_bytes // 4096) * 4096
        slots = max(1, share_bytes // self._stride)
        self._regions = max(1, slots // CALL_PAGES)
        self._per_region = min(slots, CALL_PAGES)
        size = _ROSTER_BYTES + self._regions * self._per_region * self._stride
        self._path = MEMORY / f"{_NAME}-{os.getppid()}-{name}"
        _remove_leftovers()
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(f"{self._path} belongs to another user")
            # Taken now: memory that is short later would end the process with a signal.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._memory = memoryview(self._map)
        self._roster = self._memory[:_ROSTER_BYTES].cast("Q")
        self._roster[rank] = os.getpid()

    @property
    def ranks(self) -> list[int]:
        """The ranks that share, in order."""
        return [rank for rank in range(_MAX_RANKS) if self._roster[rank]]

    def fetch(
        self, values: Sequence[ValueId], targets: Sequence[Segments], pool: str, life_ms: Life
    ) -> list[bool]:
        """Read each value's payload into its target, as `Shards.fetch` does."""
        ranks = self.ranks
        if len(ranks) < 2 or len(values) < len(ranks) or not all(value.is_whole for value in values):
            return self._values.fetch(values, targets, pool, life_ms)
        started = time.monotonic()
        lives = life.each(life_ms, len(values))
        done = [False] * len(values)
        region = xxhash.xxh3_64_intdigest(values[0].key) % self._regions
        place = ranks.index(self._rank)
        own = range(place * len(values) // len(ranks), (place + 1) * len(values) // len(ranks))

        def read(positions: Sequence[int]) -> None:
            found = self._values.fetch(
                [values[i] for i in positions],
                [targets[i] for i in positions],
                pool,
                [lives[i] for i in positions],
            )
            for i, ok in zip(positions, found, strict=True):
                done[i] = ok

        read(own)
        for i in own:
            if done[i] and i < self._per_region:
                self._leave(region, i, values[i], targets[i])
        missing = [i for i in range(len(values)) if i not in own]
        own_s = time.monotonic() - started
        end = started + min(self._timeout_s, own_s + max(_MIN_PATIENCE_S, _PATIENCE * own_s))
        while missing:
            missing = [i for i in missing if not self._take(region, i, values[i], targets[i], done)]
            if not missing or time.monotonic() >= end:
                break
            time.sleep(_POLL_S)
        if missing and time.monotonic() - started < self._timeout_s:
            read(missing)
        return done

    def close(self) -> None:
        """Leave the others; the last one's leaving gives the memory back."""
        self._roster[self._rank] = 0
        if not self.ranks:
            self._path.unlink(missing_ok=True)
        # A read that is still under way keeps the memory until it ends.
        with contextlib.suppress(BufferError):
            self._roster.release()
            self._memory.release()
            self._map.close()

    def _slot(self, region: int, index: int) -> memoryview:
        start = _ROSTER_BYTES + (region * self._per_region + index) * self._stride
        return self._memory[start : start + self._stride]

    def _leave(self, region: int, index: int, value: ValueId, payload: Segments) -> None:
        slot = self._slot(region, index)
        slot[:HEADER_BYTES] = bytes(HEADER_BYTES)
        at = _HEADER_ROOM
        for segment in payload:
            slot[at : at + len(segment)] = segment
            at += len(segment)
        slot[:HEADER_BYTES] = format.whole_header(value, payload)

    def _take(self, region: int, index: int, value: ValueId, target: Segments, done: list[bool]) -> bool:
        if index >= self._per_region:
            return False
        slot = self._slot(region, index)
        header = bytes(slot[:HEADER_BYTES])
        if not format.names(header, value):
            return False
        at = _HEADER_ROOM
        for segment in target:
            segment[:] = slot[at : at + len(segment)]
            at += len(segment)
        # Of what is now in the target, whatever happened to the slot meanwhile.
        done[index] = header == format.whole_header(value, target)
        return done[index]


def _remove_leftovers() -> None:
    """Give back the memory of engines that were killed."""
    for path in MEMORY.glob(f"{_NAME}-*"):
        with contextlib.suppress(OSError, ValueError):
            engine = int(path.name.removeprefix(f"{_NAME}-").split("-")[0])
            if path.lstat().st_uid == os.getuid() and not Path("/proc", str(engine)).exists():
                path.unlink()
