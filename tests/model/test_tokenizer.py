import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_conversations import MARKERS, conversations, texts

from model.encoding import conversation_segments, generation_segments
from model.tokenizer import (
    MAX_ENCODE_CHARS,
    MAX_RUN_CHARS,
    IncrementalDecoder,
    K3Tokenizer,
    TokenizerError,
    Vocabulary,
)
from model.vocabulary import SPECIAL_IDS, TEXT_TOKENS, VOCAB_SIZE, tokenizer_json

TINY = K3Tokenizer.from_json(tokenizer_json())
IDS = st.integers(0, VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny vocabulary in the files of the released checkpoint: ranks, and names of special tokens."""
    path = tmp_path_factory.mktemp("released")
    ranks = [TINY.token_bytes(id) for id in range(TEXT_TOKENS)]
    lines = (b"%b %d" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {str(id): {"content": text} for text, id in SPECIAL_IDS.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    (path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    return path


@given(texts)
def test_text_never_becomes_special(text: str) -> None:
    assert max(TINY.encode_text(text), default=0) < TEXT_TOKENS


@given(texts)
def test_text_survives(text: str) -> None:
    assert TINY.decode(TINY.encode_text(text)) == text


@given(conversations())
def test_special_tokens_are_the_markup_segments(turns: list[list[dict[str, Any]]]) -> None:
    segments = conversation_segments([message for added in turns for message in added])
    ids = TINY.encode_segments(segments)
    special = [id for id in ids if id >= TEXT_TOKENS]
    assert special == [TINY.markup[text] for text, is_markup in segments if is_markup]
    assert TINY.decode(ids) == "".join(text for text, _ in segments)


@given(
    st.lists(st.tuples(texts, st.booleans()), max_size=5),
    st.lists(st.tuples(texts, st.booleans()), max_size=5),
)
def test_segments_do_not_touch(first: list[tuple[str, bool]], second: list[tuple[str, bool]]) -> None:
    assert TINY.encode_segments(first) + TINY.encode_segments(second) == TINY.encode_segments(
        [*first, *second]
    )


def test_neighbours_would_merge_if_joined() -> None:
    pieces = ["mes", "sage"]
    assert TINY.encode_segments((piece, False) for piece in pieces) != TINY.encode_text("".join(pieces))


def test_markup_segments_may_hold_several_markers_and_text() -> None:
    prompt = "<|media_begin|>image 2x2<|media_content|><|media_pad|><|media_end|>"
    begin, content, pad, end = (
        TINY.markup[f"<|media_{name}|>"] for name in ("begin", "content", "pad", "end")
    )
    expected = [begin, *TINY.encode_text("image 2x2"), content, pad, end]
    assert TINY.encode_segments([(prompt, True)]) == expected
    assert not set(TINY.encode_segments([(prompt, False)])) & {begin, content, pad, end}


def test_generation_prompt() -> None:
    ids = TINY.encode_segments(generation_segments())
    markup = TINY.markup
    assert ids == [
        markup["<|open|>"],
        *TINY.encode_text("message"),
        *TINY.encode_text(" role"),
        *TINY.encode_text('="'),
        *TINY.encode_text("assistant"),
        *TINY.encode_text('"'),
        markup["<|sep|>"],
        markup["<|open|>"],
        *TINY.encode_text("think"),
        markup["<|sep|>"],
    ]


def test_special_ids_lie_as_in_the_released_vocabulary() -> None:
    released = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587}
    released |= {"<|close|>": 163588, "<|sep|>": 163589, "<|media_pad|>": 163605}
    for text, id in released.items():
        assert TINY.markup[text] - TEXT_TOKENS == id - 163584
    assert TINY.vocab_size == VOCAB_SIZE
    assert TINY.eos_ids == {TINY.markup["<|end_of_msg|>"], TINY.markup["[EOS]"]}


def test_lone_surrogates_become_replacement_characters() -> None:
    broken = json.loads(r'"a\ud83d b \ude42\ud83d"')
    assert TINY.decode(TINY.encode_text(broken)) == "a\ufffd b \ufffd\ufffd"
    pair = "\ud83d" + "\ude42"
    assert TINY.decode(TINY.encode_text(pair)) == "🙂"


@given(st.text())
def test_the_released_files_read_alike(released: Path, text: str) -> None:
    other = K3Tokenizer.load(released)
    assert other.encode_text(text) == TINY.encode_text(text)


def test_the_released_files_name_their_special_tokens(released: Path) -> None:
    other = K3Tokenizer.load(released)
    assert len(other.markup) == 256
    assert {text: other.markup[text] for text in SPECIAL_IDS} == dict(SPECIAL_IDS)
    assert other.markup[f"<|reserved_token_{TEXT_TOKENS + 255}|>"] == TEXT_TOKENS + 255
    assert other.vocab_size == TEXT_TOKENS + 256
    assert other.eos_ids == {7, 8, 9, other.markup["<|end_of_msg|>"], other.markup["[EOS]"]}


def published_pieces(text: str) -> list[str]:
    """How the published tokenizer cuts long text, as it says: character by character."""
    pieces: list[str] = []
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        chunk = text[start : start + MAX_ENCODE_CHARS]
        begin, length, spaces = 0, 0, chunk[0].isspace()
        for at, character in enumerate(chunk):
            if character.isspace() != spaces:
                length, spaces = 1, character.isspace()
            else:
                length += 1
                if length > MAX_RUN_CHARS:
                    pieces.append(chunk[begin:at])
                    begin, length = at, 1
        pieces.append(chunk[begin:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "ab" * 40_000,
        " " * 60_001,
        "x" * 25_000 + " " + "y" * 25_001,
        "a" * 24_000 + "\x1c" * 25_001 + "b" * 24_000,
        ("word " * 5_000 + "z" * 51_000) * 6,
        "語" * 25_001,
    ],
    ids=["word", "spaces", "edge", "separators", "chunks", "wide"],
)
def test_long_text_is_cut_as_published(text: str) -> None:
    seen: list[str] = []
    vocabulary = Vocabulary(lambda piece: seen.append(piece) or [], {}, TINY.markup)
    K3Tokenizer(vocabulary).encode_text(text)
    assert seen == published_pieces(text)
    assert "".join(seen) == text


@given(st.lists(st.lists(IDS, max_size=6), max_size=8))
def test_incremental_decoding_equals_decoding(parts: list[list[int]]) -> None:
    decoder = IncrementalDecoder(TINY)
    text = "".join([*map(decoder.feed, parts), decoder.finish()])
    assert text == TINY.decode(id for part in parts for id in part)


def test_incremental_decoding_holds_back_half_a_character() -> None:
    ids = [next(id for id in range(TEXT_TOKENS) if TINY.token_bytes(id) == bytes([b])) for b in "€".encode()]
    decoder = IncrementalDecoder(TINY)
    assert [decoder.feed([id]) for id in ids] == ["", "", "€"]
    assert decoder.finish() == ""
    assert decoder.feed(ids[:2]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.feed(ids) == "€"  # as new


@pytest.mark.parametrize("id", [-1, VOCAB_SIZE])
def test_ids_outside_the_vocabulary_are_refused(id: int) -> None:
    with pytest.raises(KeyError):
        TINY.decode([id])
    with pytest.raises(KeyError):
        TINY.token_bytes(id)


def test_the_caller_may_change_what_it_gets() -> None:
    TINY.encode_text("user").append(0)
    assert TINY.decode(TINY.encode_text("user")) == "user"


def test_markers_are_all_special_here() -> None:
    assert set(MARKERS) <= TINY.markup.keys()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither tiktoken.model nor"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": json.dumps({"added_tokens": []})}, "tokenizer.json"),
        ({"tiktoken.model": "QQ== 0\n"}, "tokenizer_config.json"),
        ({"tiktoken.model": "QQ== 0\n", "tokenizer_config.json": "[]"}, "no JSON object"),
        ({"tiktoken.model": "QQ== 0\n", "tokenizer_config.json": "{}"}, "no id for"),
        ({"tiktoken.model": "QQ== 1\n", "tokenizer_config.json": "{}"}, "from 0"),
        ({"tiktoken.model": "Q? 0\n", "tokenizer_config.json": "{}"}, "tokens and ranks"),
    ],
)
def test_unreadable_tokenizers_say_what_is_wrong(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=said):
        K3Tokenizer.load(tmp_path)


def test_an_id_with_two_meanings_is_refused() -> None:
    with pytest.raises(TokenizerError, match="fetch"):
        Vocabulary(lambda text: [], {TINY.markup["<|sep|>"]: b"x"}, TINY.markup)


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'sglang', 'tiktoken')));"
        "from model.tokenizer import K3Tokenizer; from model.vocabulary import tokenizer_json;"
        "print(K3Tokenizer.from_json(tokenizer_json()).encode_text('a'))"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, stdout=subprocess.DEVNULL)
