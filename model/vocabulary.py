"""Small vocabularies: byte-level BPE. The tiny checkpoint's is trained on `tokenization/corpus.txt`.

K3 in small: the same split pattern, byte-pair tokens first, then the special tokens in the same places as in
the released vocabulary (`[BOS]` 163584, `<|open|>` 163587, ...), with reserved tokens between them. Training
is deterministic, so the file has the same bytes on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model.tokenizer import SPLIT_PATTERN

VOCAB_SIZE: Final = 2048
SPECIAL_TOKENS: Final = 32
TEXT_TOKENS: Final = VOCAB_SIZE - SPECIAL_TOKENS
TOKENIZER_SOURCES: Final = ("encoding.py", "tokenizer.py", "tokenization_k3.py")
"""Modules of this package that a checkpoint holds: the code of its tokenizer."""

_SPECIAL_OFFSETS: Final = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": SPECIAL_TOKENS - 2,
    "[PAD]": SPECIAL_TOKENS - 1,
}


def special_ids(vocab_size: int) -> dict[str, int]:
    """Named special tokens and their ids in a vocabulary of this size."""
    return {text: vocab_size - SPECIAL_TOKENS + at for text, at in _SPECIAL_OFFSETS.items()}


SPECIAL_IDS: Final = MappingProxyType(special_ids(VOCAB_SIZE))
"""Named special tokens and their ids."""


@cache
def tokenizer_json() -> str:
    """Content of the tiny checkpoint's `tokenizer.json`."""
    corpus = Path(__file__).with_name("tokenization") / "corpus.txt"
    return train([corpus.read_text(encoding="utf-8")], VOCAB_SIZE)


def train(texts: Iterable[str], vocab_size: int) -> str:
    """Content of a `tokenizer.json` with `vocab_size` tokens, learnt from texts.

    Raises `ValueError` when the texts are too short for so many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text_tokens = vocab_size - SPECIAL_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=text_tokens,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    names = {id: text for text, id in special_ids(vocab_size).items()}
    tokenizer.add_special_tokens(
        [
            AddedToken(names.get(id, f"<|reserved_token_{id}|>"), special=True, normalized=False)
            for id in range(text_tokens, vocab_size)
        ]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab_size}; lengthen them"
        )
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1) + "\n"


def tokenizer_config() -> dict[str, Any]:
    """Content of `tokenizer_config.json`: the class that transformers loads, and special tokens' roles."""
    return {
        "tokenizer_class": "K3TokenizerFast",
        "auto_map": {"AutoTokenizer": [None, "tokenization_k3.K3TokenizerFast"]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
