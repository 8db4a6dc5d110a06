from array import array
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from cache_store.turn import DIGEST_BYTES, KEY_BYTES, MARK_BYTES, SHORT_BYTES, Turn
from service.generation import Generation
from service.token_ids import TokenIds, encoded_ids

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(st.lists(IDS, max_size=5))
def test_pieces_are_one_sequence(pieces: list[list[int]]):
    whole = [id for piece in pieces for id in piece]
    ids = TokenIds([array("I", piece) for piece in pieces], [encoded_ids(piece) for piece in pieces])
    assert ids == whole and whole == ids and list(ids) == whole and len(ids) == len(whole)
    assert ids != [*whole, 1]
    assert orjson.loads(ids.json()) == whole
    body = Generation("r", ids, {"max_new_tokens": 1}, "s").body()
    assert body == Generation("r", whole, {"max_new_tokens": 1}, "s").body()
    for cut in (slice(None, 3), slice(0, 64), slice(1, 4), slice(None), slice(-2, None), slice(0, 0)):
        assert ids[cut] == whole[cut]
    if whole:
        assert ids[-1] == whole[-1]


@given(IDS, IDS, IDS, st.data())
def test_a_turns_ids_are_the_same_in_json(
    prompt: list[int], completion: list[int], closing: list[int], data: st.DataObject
):
    start = data.draw(st.integers(0, len(prompt)))
    turn = Turn(
        key="0" * 2 * KEY_BYTES,
        parent=None,
        session="",
        digest=bytes(DIGEST_BYTES),
        head=bytes(SHORT_BYTES),
        created_ms=0,
        renewed_ms=0,
        messages=1,
        marks=(bytes(MARK_BYTES),),
        prompt=array("I", prompt),
        tail=(start, data.draw(st.integers(0, len(prompt) - start))),
        completion=array("I", completion),
        closing=closing,
        reasoning="",
        calls=(),
        finish="stop",
        highest=0,
        usage=(0,) * 6,
    )
    for keep_tail in (True, False, True):
        encoded = turn.tokens_json(keep_tail=keep_tail)
        assert orjson.loads(b"[%b]" % encoded) == turn.tokens(keep_tail=keep_tail).tolist()
    assert replace(turn, completion=array("I", [7])).tokens_json() != turn.tokens_json() or completion == [7]
