"""Values over one connection: found, read and written in as few round trips as their form allows.

The functions raise `WireError` when the connection fails; what was done until then stands in the lists that
they fill. What they find wrong with stored bytes, or what the server refuses to store, they report.
"""

import operator
from collections.abc import Callable, Iterator, Sequence

from cache_store import format, life
from cache_store.format import HEADER_BYTES, Segments, ValueId
from cache_store.life import CHUNK_TTL_MARGIN_MS, Life
from cache_store.resp import Connection, Status
from cache_store.stream import Buffer, ServerRefused

Report = Callable[[str, object], None]
"""Takes the kind of a fault and its details."""

_REFUSALS = frozenset(
    {"OOM", "LOADING", "BUSY", "NOAUTH", "WRONGPASS", "NOPERM", "READONLY", "MISCONF", "MASTERDOWN"}
)


def refusal_kind(refused: ServerRefused) -> str:
    """The kind of fault that an error reply stands for: its code, if it is a known one."""
    return refused.code.lower() if refused.code in _REFUSALS else refused.kind


def find(connection: Connection, keys: Sequence[bytes], record_bytes: Sequence[int]) -> list[bool]:
    """Under which keys there is a value: a record of exactly the right length. One round trip."""
    return list(map(operator.eq, connection.lengths(keys), record_bytes))


def read(
    connection: Connection,
    values: Sequence[ValueId],
    targets: Sequence[Segments],
    done: list[bool],
    life_ms: Life,
    report: Report,
) -> None:
    """Read each payload into its target and set `done` where every byte was checked.

    What was read lives for another `life_ms` at least (0: as long as it would have); what is damaged is
    removed, so that the next lookup does not promise it again.
    """
    remains: list[bytes] = []
    whole = [i for i, value in enumerate(values) if value.is_whole]
    found = _read_records(
        connection,
        [(values[i].key, targets[i]) for i in whole],
        lambda at, payload: format.whole_header(values[whole[at]], payload),
    )
    for i, intact in zip(whole, found, strict=True):
        done[i] = intact is True
        if intact is False:
            remains.append(values[i].key)
            report("damaged", values[i].key)
    chunks = _read_chunked(connection, values, targets, done, remains, report)
    lives = life.each(life_ms, len(values))
    read = [i for i, ok in enumerate(done) if ok and lives[i]]
    life.prolong(connection, [values[i] for i in read], [lives[i] for i in read], chunks)
    connection.unlink(remains)


def write(
    connection: Connection,
    values: Sequence[ValueId],
    payloads: Sequence[Segments],
    done: list[bool],
    life_ms: Life,
    report: Report,
) -> None:
    """Write each value that is not there, prolong the life of each that is, and set `done` for both."""
    lives = life.each(life_ms, len(values))
    held = find(connection, [value.key for value in values], [value.record_bytes for value in values])
    for i, value in enumerate(values):
        done[i] = held[i]
        if not held[i] and not value.is_whole:
            done[i] = _write_chunked(connection, value, payloads[i], lives[i], report)
    absent = [i for i, value in enumerate(values) if not held[i] and value.is_whole]
    outcomes = connection.write(
        [(values[i].key, [format.whole_header(values[i], payloads[i]), *payloads[i]]) for i in absent],
        [lives[i] for i in absent],
    )
    for i, refused in zip(absent, outcomes, strict=True):
        done[i] = _stored(refused, report)
    there = [i for i, ok in enumerate(held) if ok]
    life.prolong(connection, [values[i] for i in there], [lives[i] for i in there])


def _read_records(
    connection: Connection,
    records: Sequence[tuple[bytes, Segments]],
    expected_header: Callable[[int, Segments], bytes],
) -> Iterator[bool | None]:
    """Read records whose body lengths are known; of each whether it is intact, or None when missing."""
    headers = [memoryview(bytearray(HEADER_BYTES)) for _ in records]
    statuses = connection.read(
        [key for key, _ in records],
        [[header, *body] for header, (_, body) in zip(headers, records, strict=True)],
    )
    for at, status in enumerate(statuses):
        # Checked here, while the next values are under way.
        if status is Status.READ:
            yield bytes(headers[at]) == expected_header(at, records[at][1])
        else:
            yield None if status is Status.MISSING else False


def _read_chunked(
    connection: Connection,
    values: Sequence[ValueId],
    targets: Sequence[Segments],
    done: list[bool],
    remains: list[bytes],
    report: Report,
) -> dict[bytes, list[bytes]]:
    """Read the values that have manifests; returns the keys of the chunks of those that are intact."""
    chunked = [i for i, value in enumerate(values) if not value.is_whole]
    records = [bytearray(values[i].record_bytes) for i in chunked]
    statuses = connection.read([values[i].key for i in chunked], [[memoryview(r)] for r in records])
    kept: dict[bytes, list[bytes]] = {}
    for i, record, status in zip(chunked, records, list(statuses), strict=True):
        value = values[i]
        if status is Status.MISSING:
            continue
        digests = format.read_manifest(value, record) if status is Status.READ else None
        keys = format.chunk_keys(value, digests) if digests is not None else []
        if digests is not None and _read_chunks(connection, value, keys, digests, targets[i]):
            done[i] = True
            kept[value.key] = keys
        else:
            remains += [value.key, *keys]
            report("damaged", value.key)
    return kept


def _read_chunks(
    connection: Connection, value: ValueId, keys: list[bytes], digests: list[bytes], target: Segments
) -> bool:
    parts = format.cut(target)

    def expected_header(index: int, part: Segments) -> bytes:
        body_digest = format.digest(part)
        return format.chunk_header(value, index, body_digest) if body_digest == digests[index] else b""

    # All of them: a reply that is left unread costs the connection.
    intact = list(_read_records(connection, list(zip(keys, parts, strict=True)), expected_header))
    return all(intact)


def _write_chunked(
    connection: Connection, value: ValueId, payload: Segments, life_ms: int, report: Report
) -> bool:
    parts = format.cut(payload)
    digests = [format.digest(part) for part in parts]
    items: list[tuple[bytes, list[Buffer]]] = [
        (key, [format.chunk_header(value, index, digests[index]), *parts[index]])
        for index, key in enumerate(format.chunk_keys(value, digests))
    ]
    outcomes = connection.write(items, life_ms + CHUNK_TTL_MARGIN_MS)
    stored = [_stored(refused, report) for refused in outcomes]
    if not all(stored):
        return False
    # The commit point: nobody sees the value before, and all of it is there.
    return _stored(connection.write([(value.key, [format.manifest(value, digests)])], life_ms)[0], report)


def _stored(refused: ServerRefused | None, report: Report) -> bool:
    if refused is not None:
        report(refusal_kind(refused), refused)
    return refused is None
