import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.filler import Filler
from replay.layout import Branch, Message
from replay.scale import Scale

WORDS = tuple(f" {chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(90))


def text(filler: Filler, block: int, width: int) -> tuple[str, ...]:
    return tuple(filler.words_at(Branch((block,)), 0, width))


@pytest.mark.parametrize("width", [2, 3, 64])
def test_different_blocks_have_different_text(width):
    filler = Filler(WORDS, Scale(), width, b"k" * 32)
    assert len({text(filler, block, width) for block in range(len(WORDS) ** 2)}) == len(WORDS) ** 2


def test_neighbouring_blocks_differ_in_their_first_word():
    filler = Filler(WORDS, Scale(), 64, b"k" * 32)
    assert len({text(filler, block, 1) for block in range(500, 500 + len(WORDS))}) == len(WORDS)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64), st.sampled_from(["1", "1/3", "1/32"]))
def test_a_range_of_positions_is_a_slice_of_the_whole(start, length, block_tokens, scale):
    filler = Filler(WORDS, Scale.parse(scale), block_tokens, b"k" * 32)
    branch = Branch(tuple(range(20_000)))
    whole = filler.words_at(branch, 0, 600)
    assert len(whole) == 600
    assert filler.words_at(branch, start, start + length) == whole[start : start + length]


def test_text_depends_on_the_key_and_the_block_alone():
    message = Message("user", 3, 200, 7, Branch((5, 6, 7, 8)))
    same = [Filler(WORDS, Scale(), 64, key).text(message) for key in (b"a" * 32, b"a" * 32, b"b" * 32)]
    assert same[0] == same[1] != same[2]
    assert len(same[0].split()) == message.words == 190


def test_text_is_as_many_tokens_as_words(tokenizer, tokenizer_dir):
    from replay.words import from_tokenizer

    filler = Filler(from_tokenizer(tokenizer_dir), Scale(), 64, b"k" * 32)
    for end in (10, 63, 64, 65, 5000):
        message = Message("user", 0, end, 5, Branch(tuple(range(100))))
        assert len(tokenizer.encode(filler.text(message)).ids) == message.words
