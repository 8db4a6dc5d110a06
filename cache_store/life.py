"""How long stored values live: prolonged when they are used, shortened when a newer one takes their place.

A life is only ever raised by use and only ever lowered on purpose, so two engines that give one value
different lives leave it the longer one. Redis 6.2 has no `PEXPIRE ... GT`, so what is left is asked first:
one round trip where nothing is to do, as in most uses, and a second one where something is.
"""

from collections.abc import Mapping, Sequence

from cache_store import format
from cache_store.format import ValueId
from cache_store.resp import Connection, Status

# Chunks outlive the manifest that names them.
CHUNK_TTL_MARGIN_MS = 60_000

Life = int | Sequence[int]
"""Milliseconds to live: one number for all values, or one for each."""


def each(life_ms: Life, count: int) -> list[int]:
    """The life of each of `count` values, in ms."""
    lives = [life_ms] * count if isinstance(life_ms, int) else list(life_ms)
    assert len(lives) == count, f"{len(lives)} lives for {count} values"
    return lives


def prolong(
    connection: Connection,
    values: Sequence[ValueId],
    life_ms: Life,
    chunks: Mapping[bytes, Sequence[bytes]] | None = None,
) -> None:
    """Let each value that exists live for `life_ms` at least; `chunks` has keys that are known already."""
    _set(connection, values, each(life_ms, len(values)), chunks or {}, lower=False)


def shorten(connection: Connection, values: Sequence[ValueId], life_ms: Life) -> int:
    """Let each value that exists live for `life_ms` at most; returns how many would have lived longer."""
    return _set(connection, values, each(life_ms, len(values)), {}, lower=True)


def _set(
    connection: Connection,
    values: Sequence[ValueId],
    lives: Sequence[int],
    known: Mapping[bytes, Sequence[bytes]],
    *,
    lower: bool,
) -> int:
    left = connection.integers([(b"PTTL", value.key) for value in values])
    # -1: lives for ever; -2: does not exist.
    wanted = [
        (value, life)
        for value, life, now in zip(values, lives, left, strict=True)
        if (now == -1 or now > life if lower else 0 <= now < life)
    ]
    chunks = {**_chunks(connection, [v for v, _ in wanted if not v.is_whole and v.key not in known]), **known}
    commands: list[tuple[bytes, ...]] = []
    for value, life in wanted:
        own = (b"PEXPIRE", value.key, b"%d" % life)
        theirs = [
            (b"PEXPIRE", key, b"%d" % (life + CHUNK_TTL_MARGIN_MS)) for key in chunks.get(value.key, ())
        ]
        # At no moment has a manifest more time left than its chunks.
        commands += [own, *theirs] if lower else [*theirs, own]
    connection.integers(commands)
    return len(wanted)


def _chunks(connection: Connection, values: Sequence[ValueId]) -> dict[bytes, list[bytes]]:
    """The keys of the chunks of each value, by the value's key, where its manifest is sound."""
    records = [bytearray(value.record_bytes) for value in values]
    statuses = list(connection.read([value.key for value in values], [[memoryview(r)] for r in records]))
    found: dict[bytes, list[bytes]] = {}
    for value, record, status in zip(values, records, statuses, strict=True):
        digests = format.read_manifest(value, record) if status is Status.READ else None
        if digests is not None:
            found[value.key] = format.chunk_keys(value, digests)
    return found
