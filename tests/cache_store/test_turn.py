import random
from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache_store.turn import (
    DIGEST_BYTES,
    MARK_BYTES,
    SHORT_BYTES,
    Turn,
    TurnFormatError,
    decode_turn,
    encode_turn,
)

IDS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 255), max_size=40)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEYS = st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex)
NUMBERS = st.integers(0, 2**62)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    prompt = draw(IDS)
    start = draw(st.integers(0, len(prompt)))
    marks = draw(st.lists(st.binary(min_size=MARK_BYTES, max_size=MARK_BYTES), min_size=1, max_size=5))
    return Turn(
        key=draw(KEYS),
        parent=draw(st.none() | KEYS),
        session=draw(TEXTS),
        digest=draw(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)),
        head=draw(st.binary(min_size=SHORT_BYTES, max_size=SHORT_BYTES)),
        created_ms=draw(NUMBERS),
        renewed_ms=draw(NUMBERS),
        messages=len(marks) + draw(st.integers(0, 500)),
        marks=tuple(marks),
        prompt=array("I", prompt),
        tail=(start, draw(st.integers(0, len(prompt) - start))),
        completion=array("I", draw(IDS)),
        closing=array("I", draw(IDS)),
        reasoning=draw(TEXTS),
        calls=tuple(draw(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=3))),
        highest=draw(st.integers(0, 2**32 - 1)),
        finish=draw(st.sampled_from(("stop", "length", "tool_calls", "abort"))),
        usage=tuple(draw(st.lists(NUMBERS, min_size=6, max_size=6))),
    )


def plain(**changes: Any) -> Turn:
    values: dict[str, Any] = {
        "key": "ab" * 16,
        "parent": None,
        "session": "s",
        "digest": bytes(DIGEST_BYTES),
        "head": bytes(SHORT_BYTES),
        "created_ms": 1,
        "renewed_ms": 1,
        "messages": 2,
        "marks": (bytes(MARK_BYTES),),
        "prompt": array("I", [1, 2, 3, 4]),
        "tail": (1, 2),
        "completion": array("I", [5, 6]),
        "closing": array("I", [7]),
        "reasoning": "hm",
        "calls": (("id", "name", "{}"),),
        "finish": "stop",
        "highest": 7,
        "usage": (1, 2, 3, 4, 5, 6),
    }
    return Turn(**{**values, **changes})


@given(turns())
@example(plain(prompt=array("I"), tail=(0, 0), completion=array("I"), closing=array("I")))
def test_a_turn_comes_back_unchanged(turn: Turn) -> None:
    assert decode_turn(turn.key, encode_turn(turn)) == turn


@given(turns(), st.data())
def test_any_changed_bit_is_noticed(turn: Turn, data: st.DataObject) -> None:
    encoded = bytearray(encode_turn(turn))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TurnFormatError):
        decode_turn(turn.key, bytes(encoded))


@given(turns(), st.data())
def test_a_shortened_turn_is_noticed(turn: Turn, data: st.DataObject) -> None:
    encoded = encode_turn(turn)
    with pytest.raises(TurnFormatError):
        decode_turn(turn.key, encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_the_turn_of_another_key_is_noticed() -> None:
    with pytest.raises(TurnFormatError, match="another turn"):
        decode_turn("cd" * 16, encode_turn(plain()))


def test_tokens_with_and_without_the_tail() -> None:
    assert list(plain().tokens()) == [1, 2, 3, 4, 5, 6, 7]
    assert list(plain().tokens(keep_tail=False)) == [1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "changes",
    [{"key": "ab"}, {"marks": ()}, {"messages": 0}, {"tail": (3, 2)}, {"usage": (1,)}, {"head": b""}],
)
def test_invariants(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        plain(**changes)


def test_random_ids_take_three_bytes_each() -> None:
    chance = random.Random(0)
    ids = array("I", [chance.randrange(163_840) for _ in range(10_000)])
    assert len(encode_turn(plain(completion=ids))) < 3 * 10_000
