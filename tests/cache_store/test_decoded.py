from array import array
from dataclasses import replace

from cache_store.decoded import DecodedTurns
from cache_store.turn import DIGEST_BYTES, MARK_BYTES, SHORT_BYTES, Turn, encode_turn


def turn(number: int, tokens: int = 10, highest: int = 9) -> Turn:
    return Turn(
        key=f"{number:032x}",
        parent=None,
        session="",
        digest=bytes(DIGEST_BYTES),
        head=bytes(SHORT_BYTES),
        created_ms=1,
        renewed_ms=1,
        messages=1,
        marks=(bytes(MARK_BYTES),),
        prompt=array("I", [9] * tokens),
        tail=(0, 0),
        completion=array("I", [1]),
        closing=array("I"),
        reasoning="",
        calls=(),
        finish="stop",
        highest=highest,
        usage=(0,) * 6,
    )


def test_only_the_same_bytes_are_taken_from_memory():
    turns, one = DecodedTurns(), turn(1)
    data = encode_turn(one)
    first = turns.decode(one.key, data)
    assert first == one
    assert turns.decode(one.key, bytes(bytearray(data))) is first
    assert turns.decode(one.key, None) is None
    other = replace(one, finish="length")
    assert turns.decode(one.key, encode_turn(other)) == other
    assert turns.decode(one.key, data[:-1]) is None
    assert turns.decode(turn(2).key, data) is None


def test_memory_is_bounded_and_the_latest_stay():
    turns = DecodedTurns(budget_bytes=100_000)
    data = [encode_turn(turn(number, 5_000)) for number in range(10)]
    decoded = [turns.decode(turn(number).key, raw) for number, raw in enumerate(data)]
    assert all(decoded)
    assert turns.decode(turn(9).key, data[9]) is decoded[9]
    assert turns.decode(turn(0).key, data[0]) is not decoded[0]


def test_an_id_above_the_highest_makes_a_turn_nothing():
    lying = turn(1, highest=8)
    assert DecodedTurns().decode(lying.key, encode_turn(lying)) is None
