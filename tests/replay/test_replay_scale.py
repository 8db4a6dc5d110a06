from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.scale import Scale

scales = st.builds(
    Scale, st.fractions(min_value=Fraction(1, 4096), max_value=1, max_denominator=4096).filter(bool)
)
tokens = st.integers(0, 10**7)


@given(scales, tokens, tokens)
def test_positions_keep_their_order_and_never_grow(scale, left, right):
    low, high = sorted((left, right))
    assert 0 <= scale.position(low) <= scale.position(high) <= high


@given(scales, st.integers(0, 10**5), st.integers(1, 512))
def test_a_position_lies_in_its_block(scale, position, block_tokens):
    block = scale.block_at(position, block_tokens)
    assert scale.position(block * block_tokens) <= position < scale.position((block + 1) * block_tokens)


def test_the_documented_case():
    scale = Scale.parse("1/32")
    assert [scale.position(64 * block) for block in range(4)] == [0, 2, 4, 6]
    assert scale.length(5) == 1 and scale.length(6400) == 200


@pytest.mark.parametrize("text", ["0", "2", "-1/2", "1/0", "half", ""])
def test_refuses_what_is_no_scale(text):
    with pytest.raises(ValueError, match="scale"):
        Scale.parse(text)


@pytest.mark.parametrize("text", ["1/32", "0.03125", " 1/32 "])
def test_reads_fractions_and_decimals(text):
    assert Scale.parse(text) == Scale(Fraction(1, 32))
