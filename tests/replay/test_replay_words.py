import random

import pytest

from replay.errors import EndpointError, ReplayError
from replay.words import FEWEST_WORDS, candidates, from_endpoint, from_tokenizer


def test_words_of_a_tokenizer_are_one_token_each_in_any_order(tokenizer, tokenizer_dir):
    words = from_tokenizer(tokenizer_dir)
    assert words == from_tokenizer(tokenizer_dir / "tokenizer.json")
    assert len(words) >= 100
    text = random.Random(1).choices(words, k=5000)
    assert len(tokenizer.encode("".join(text)).ids) == 5000


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ReplayError, match=r"no tokenizer\.json"):
        from_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ReplayError, match="can't be read"):
        from_tokenizer(tmp_path)


async def test_words_are_found_by_asking_the_endpoint(tokenizer):
    asked = []

    async def count(text: str) -> int:
        asked.append(text)
        return 17 + len(tokenizer.encode(text).ids)

    words = await from_endpoint(count)
    assert len(words) >= FEWEST_WORDS and len(asked) <= 160
    assert all(len(tokenizer.encode(word).ids) == 1 for word in words)
    single = {word for word in candidates() if len(tokenizer.encode(word).ids) == 1}
    assert set(words) <= single


async def test_a_large_vocabulary_needs_few_questions():
    asked = 0

    async def count(text: str) -> int:
        nonlocal asked
        asked += 1
        return 40 + text.count(" ")

    assert set(await from_endpoint(count)) == set(candidates())
    assert asked <= 20


async def test_an_endpoint_without_such_words_wants_a_tokenizer():
    async def count(text: str) -> int:
        return 3 + len(text)

    with pytest.raises(EndpointError, match="--tokenizer"):
        await from_endpoint(count)
