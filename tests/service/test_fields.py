import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidRequest
from service.fields import MAX_DEPTH, Fields, parse_object

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


def test_paths_name_the_place_in_the_request():
    fields = Fields({"messages": [{"role": "user"}, {"role": 3}]})
    with pytest.raises(InvalidRequest) as caught:
        fields.entries("messages")[1].string("role")
    assert caught.value.param == "messages[1].role"
    assert str(caught.value) == "messages[1].role: must be a string, not a number."


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}'])
def test_what_is_no_json_object_is_refused(body: bytes):
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"


def test_depth_is_bounded():
    def nested(levels: int) -> bytes:
        return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    parse_object(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 1000, 100_000):
        with pytest.raises(InvalidRequest):
            parse_object(nested(levels))


def test_null_counts_as_absent():
    fields = Fields(dict.fromkeys("abcdefgh"))
    assert fields.string("a") is None
    assert fields.boolean("b") is None
    assert fields.integer("c", 0, 1) is None
    assert fields.number("d", 0, 1) is None
    assert fields.nested("e") is None
    assert fields.entries("f") == []
    assert fields.strings("g") == []


def test_a_boolean_is_no_number_and_a_whole_float_is_one():
    fields = Fields({"flag": True, "whole": 3.0, "half": 0.5, "infinite": float("inf")})
    with pytest.raises(InvalidRequest):
        fields.integer("flag", 0, 1)
    with pytest.raises(InvalidRequest):
        fields.number("flag", 0, 1)
    with pytest.raises(InvalidRequest):
        fields.integer("half", 0, 1)
    with pytest.raises(InvalidRequest):
        fields.number("infinite", 0, 1)
    with pytest.raises(InvalidRequest):
        fields.number("whole", 3, 4, above=True)
    assert fields.integer("whole", 0, 3) == 3


@given(JSON)
def test_a_reader_gives_its_type_or_complains(value: object):
    fields = Fields({"x": value})
    readers = (
        (lambda: fields.string("x"), str),
        (lambda: fields.boolean("x"), bool),
        (lambda: fields.integer("x", -(2**63), 2**63), int),
        (lambda: fields.number("x", -1e308, 1e308), float),
        (lambda: fields.nested("x"), Fields),
        (lambda: fields.entries("x"), list),
        (lambda: fields.strings("x"), list),
    )
    for read, kind in readers:
        try:
            found = read()
        except InvalidRequest as error:
            assert error.param is not None
            assert error.param.startswith("x")
        else:
            assert found is None or isinstance(found, kind)
