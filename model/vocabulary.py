"""The tiny checkpoint's vocabulary: byte-level BPE trained on `tokenization/corpus.txt`.

K3 in small: the same split pattern, byte-pair tokens first, then the special tokens in the same places as in
the released vocabulary (`[BOS]` 163584, `<|open|>` 163587, ...), with reserved tokens between them. Training
is deterministic, so the file has the same bytes on every machine.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model.tokenizer import SPLIT_PATTERN

VOCAB_SIZE: Final = 2048
SPECIAL_TOKENS: Final = 32
TEXT_TOKENS: Final = VOCAB_SIZE - SPECIAL_TOKENS

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

SPECIAL_IDS: Final = MappingProxyType({text: TEXT_TOKENS + at for text, at in _SPECIAL_OFFSETS.items()})
"""Named special tokens and their ids."""


@cache
def tokenizer_json() -> str:
    """Content of `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = Path(__file__).with_name("tokenization") / "corpus.txt"
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus.read_text(encoding="utf-8")], trainer)
    names = {id: text for text, id in SPECIAL_IDS.items()}
    tokenizer.add_special_tokens(
        [
            AddedToken(names.get(id, f"<|reserved_token_{id}|>"), special=True, normalized=False)
            for id in range(TEXT_TOKENS, VOCAB_SIZE)
        ]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"{corpus} gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}; lengthen it"
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
