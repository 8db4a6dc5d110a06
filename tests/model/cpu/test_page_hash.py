"""Names of pages: those that SGLang's compiled code gives, recorded from it."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.cpu.page_hash import digest_chain

PRIOR = bytes(range(32))
TOKENS = list(range(130))


def test_the_names_are_those_of_the_compiled_code() -> None:
    assert digest_chain([1, 2, 3], 3, 1, False, None, 3) == [
        "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    ]
    assert digest_chain([], 0, 1, False, None, 1, at_least=1) == [
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    ]
    assert digest_chain(TOKENS, 130, 1, False, None, 64) == [
        "fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5",
        "1617a7384eff5e9135098c24794739af884859cdb17c1a61a834e8d6ac997351",
        "7e31821709bdd26923894e3822625e6280d8b7d509cbe35a1b2f5a8b784e0623",
    ]
    assert digest_chain(TOKENS, 130, 1, False, PRIOR, 64) == [
        "c3ded07b1dd010c5556c500ad45a61fa3a9d131ff87fcba2d186792785d5e59d",
        "b2ec406e7fceeb8234fc66f6161827c557dc2a64bb34cb596fb2288a4d53577f",
        "ba023811ff7762180eef5afea73b245acdd1d300117fcabb71761bbe3175af32",
    ]


def test_a_page_with_a_number_beyond_32_bits_is_hashed_wide() -> None:
    assert digest_chain([5, 1 << 35, 7], 3, 1, False, None, 2) == [
        "a6f39b13df6ebcc16c7f94dfc88df346586ab1268226606b4152b68d6031fd59",
        "5465460b7a0fc892cdce46714aad86988feb70f0ea52f6943e239a091910b53b",
    ]


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=200), st.sampled_from([1, 16, 64]))
def test_a_chain_can_be_continued_from_any_page(ids: list[int], page: int) -> None:
    whole = digest_chain(array("Q", ids), len(ids), 1, False, None, page)
    assert len(whole) == -(-len(ids) // page)
    for done in range(1, len(whole)):
        rest = ids[done * page :]
        assert digest_chain(rest, len(rest), 1, False, bytes.fromhex(whole[done - 1]), page) == whole[done:]


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=100))
def test_bigrams_are_pairs_of_neighbours(ids: list[int]) -> None:
    pairs = [word for pair in pairwise(ids) for word in pair]
    length = len(ids) - 1
    assert digest_chain(ids, length, 1, True, PRIOR, 16) == digest_chain(pairs, length, 2, False, PRIOR, 16)


@pytest.mark.parametrize(("prior", "page", "said"), [(b"short", 64, "5 bytes"), (None, 0, "page_size is 0")])
def test_what_makes_no_sense_is_refused(prior: bytes | None, page: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        digest_chain([1], 1, 1, False, prior, page)
