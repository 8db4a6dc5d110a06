import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store import format, namespace
from cache_store.format import CHUNK_BYTES, HEADER_BYTES, ValueId

NAMESPACE = bytes(range(16))
OTHER_NAMESPACE = bytes(range(1, 17))


def whole_record(value: ValueId, payload: bytes) -> bytes:
    return format.whole_header(value, [memoryview(payload)]) + payload


def accepts(value: ValueId, record: bytes) -> bool:
    """What a reader of a whole record does with received bytes."""
    if len(record) != value.record_bytes:
        return False
    body = memoryview(record)[HEADER_BYTES:]
    return record[:HEADER_BYTES] == format.whole_header(value, [body])


payloads = st.binary(min_size=1, max_size=2000)
keys = st.binary(min_size=1, max_size=100)


@given(keys, payloads)
def test_what_was_written_is_accepted(key: bytes, payload: bytes):
    value = ValueId(key, NAMESPACE, len(payload))
    assert accepts(value, whole_record(value, payload))


@given(payloads, st.data())
def test_any_flipped_bit_is_refused(payload: bytes, data: st.DataObject):
    value = ValueId(b"key", NAMESPACE, len(payload))
    record = bytearray(whole_record(value, payload))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert not accepts(value, bytes(record))


@given(payloads, st.data())
def test_any_cut_or_growth_is_refused(payload: bytes, data: st.DataObject):
    value = ValueId(b"key", NAMESPACE, len(payload))
    record = whole_record(value, payload)
    assert not accepts(value, record[: data.draw(st.integers(0, len(record) - 1))])
    assert not accepts(value, record + data.draw(st.binary(min_size=1, max_size=100)))


@given(payloads, st.data())
def test_zeros_are_refused(payload: bytes, data: st.DataObject):
    value = ValueId(b"key", NAMESPACE, len(payload))
    record = whole_record(value, payload)
    assert not accepts(value, bytes(len(record)))
    start = data.draw(st.integers(0, len(record) - 1))
    zeroed = record[:start] + bytes(len(record) - start)
    assert accepts(value, zeroed) == (zeroed == record)


@given(keys, keys, payloads)
def test_another_keys_record_is_refused(key: bytes, other: bytes, payload: bytes):
    mine, foreign = ValueId(key, NAMESPACE, len(payload)), ValueId(other, NAMESPACE, len(payload))
    assert accepts(mine, whole_record(foreign, payload)) == (key == other)


@given(payloads)
def test_another_namespaces_record_is_refused(payload: bytes):
    mine = ValueId(b"key", NAMESPACE, len(payload))
    foreign = ValueId(b"key", OTHER_NAMESPACE, len(payload))
    assert not accepts(mine, whole_record(foreign, payload))


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 60))
def test_cutting_keeps_every_byte(parts: list[bytes], part_bytes: int):
    joined = b"".join(parts)
    cut = format.cut([memoryview(part) for part in parts], part_bytes)
    pieces = [b"".join(piece) for piece in cut]
    assert b"".join(pieces) == joined
    assert all(len(piece) == part_bytes for piece in pieces[:-1])
    assert all(0 < len(piece) <= part_bytes for piece in pieces)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=20))
def test_a_digest_does_not_depend_on_the_segments(parts: list[bytes]):
    joined = b"".join(parts)
    assert format.digest([memoryview(part) for part in parts]) == format.digest([memoryview(joined)])


@given(st.integers(1, 20 * CHUNK_BYTES))
def test_lengths_add_up(length: int):
    value = ValueId(b"key", NAMESPACE, length)
    assert (value.chunk_count - 1) * CHUNK_BYTES < length <= value.chunk_count * CHUNK_BYTES
    assert value.is_whole == (value.chunk_count == 1)
    if value.is_whole:
        assert value.record_bytes == HEADER_BYTES + length
    else:
        assert value.record_bytes == HEADER_BYTES + 16 * value.chunk_count


def digests(value: ValueId, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(value.chunk_count)]


@given(st.integers(CHUNK_BYTES + 1, 20 * CHUNK_BYTES), keys)
def test_a_manifest_reads_back(length: int, key: bytes):
    value = ValueId(key, NAMESPACE, length)
    record = format.manifest(value, digests(value))
    assert len(record) == value.record_bytes
    assert format.read_manifest(value, record) == digests(value)


@settings(max_examples=300)
@given(st.integers(CHUNK_BYTES + 1, 9 * CHUNK_BYTES), st.data())
def test_a_damaged_manifest_is_refused(length: int, data: st.DataObject):
    value = ValueId(b"key", NAMESPACE, length)
    record = bytearray(format.manifest(value, digests(value)))
    assert format.read_manifest(value, record[: data.draw(st.integers(0, len(record) - 1))]) is None
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert format.read_manifest(value, record) is None


def test_foreign_manifests_are_refused():
    value = ValueId(b"key", NAMESPACE, 3 * CHUNK_BYTES)
    for other in (
        ValueId(b"other", NAMESPACE, value.length),
        ValueId(b"key", OTHER_NAMESPACE, value.length),
        ValueId(b"key", NAMESPACE, value.length - 1),
    ):
        assert format.read_manifest(value, format.manifest(other, digests(other))) is None


def test_chunks_of_another_value_index_or_payload_have_other_headers():
    value = ValueId(b"key", NAMESPACE, 3 * CHUNK_BYTES)
    body = format.digest([memoryview(b"x")])
    headers = {
        format.chunk_header(value, 0, body),
        format.chunk_header(value, 1, body),
        format.chunk_header(value, 0, format.digest([memoryview(b"y")])),
        format.chunk_header(ValueId(b"other", NAMESPACE, value.length), 0, body),
        format.chunk_header(ValueId(b"key", NAMESPACE, value.length + 1), 0, body),
        format.whole_header(ValueId(b"key", NAMESPACE, 1), [memoryview(b"x")]),
    }
    assert len(headers) == 6


def test_payloads_that_differ_have_chunks_under_different_keys():
    value = ValueId(b"key", NAMESPACE, 3 * CHUNK_BYTES)
    one, two = format.chunk_keys(value, digests(value, 1)), format.chunk_keys(value, digests(value, 2))
    assert len({*one, *two}) == 6
    assert all(key.startswith(b"key:") for key in one)


@pytest.mark.parametrize("arguments", [(b"", NAMESPACE, 1), (b"key", b"short", 1), (b"key", NAMESPACE, 0)])
def test_a_value_id_asserts_its_invariants(arguments: tuple[bytes, bytes, int]):
    with pytest.raises(AssertionError):
        ValueId(*arguments)


def vectors() -> dict[str, list[str]]:
    """The fields of the test vectors in the specification."""
    text = (Path(format.__file__).parent / "README.md").read_text().split("### Test vectors")[1]
    found: dict[str, list[str]] = {}
    for line in text.split("\n## ")[0].splitlines():
        if line.startswith("    "):
            name, value = line.split()
            found.setdefault(name, []).append(value)
    return found


def test_the_specifications_vectors():
    fields = vectors()
    whole, chunked = (key.encode() for key in fields["key"])
    value = ValueId(whole, NAMESPACE, 8)
    assert whole_record(value, b"longhaul").hex() == fields["record"][0]
    value = ValueId(chunked, NAMESPACE, CHUNK_BYTES + 5)
    parts = format.cut([memoryview(bytes(at % 251 for at in range(value.length)))])
    body_digests = [format.digest(part) for part in parts]
    assert format.manifest(value, body_digests).hex() == fields["manifest"][0]
    headers = [format.chunk_header(value, at, body).hex() for at, body in enumerate(body_digests)]
    assert headers == fields["header"]
    keys_of_chunks = [key.decode() for key in format.chunk_keys(value, body_digests)]
    assert keys_of_chunks == [chunked.decode() + name.removeprefix("K") for name in fields["chunk"]]
    page = "e3b0c442" * 8
    assert namespace.page_keys(NAMESPACE, "kv", [page]) == [whole]
    assert namespace.page_keys(NAMESPACE, "mamba", [page], "t0.2") == [chunked]
