"""Kimi K3's tokenizer without torch or transformers: segments to ids, ids to bytes.

Two vocabularies read alike: `tiktoken.model` (the released checkpoint, together with `tokenizer_config.json`,
which names its 256 special tokens) and `tokenizer.json` (the tiny checkpoint, or a converted one).

Special tokens come from markup segments only. Ordinary text never yields one, whatever it spells, and no
segment is merged with its neighbour.

Sources: the split pattern, the 256 special ids behind the vocabulary and the two input limits are those of
the published `tokenization_kimi.py` (Kimi K2 and K3 share them). A cut at a limit is a token boundary, so the
limits belong to the encoding; "white space" in them is what `str.isspace` says.

Needs `tokenizers` or `tiktoken` and the standard library only: a copy of this file travels inside the tiny
checkpoint.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

SPLIT_PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text falls into words before byte-pair encoding."""

SPECIAL_TOKENS: Final = 256
"""Ids kept for special tokens behind the vocabulary of `tiktoken.model`."""

MAX_ENCODE_CHARS: Final = 400_000
MAX_RUN_CHARS: Final = 25_000
"""The longest run of white space, or of anything else, that is encoded in one go."""

REQUIRED_MARKERS: Final = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
EOS_MARKERS: Final = ("<|end_of_msg|>", "[EOS]")

_LONG_RUN: Final = re.compile(rf"\s{{{MAX_RUN_CHARS + 1},}}|\S{{{MAX_RUN_CHARS + 1},}}")
_CACHED_TEXT_CHARS: Final = 32
_CACHED_TEXTS: Final = 4096


class TokenizerError(Exception):
    """A checkpoint directory whose tokenizer cannot be read; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-pair vocabulary: `encode` takes ordinary text, `tokens` and `markup` hold disjoint ids."""

    encode: Callable[[str], list[int]]
    tokens: Mapping[int, bytes]
    markup: Mapping[str, int]

    def __post_init__(self) -> None:
        if missing := [marker for marker in REQUIRED_MARKERS if marker not in self.markup]:
            raise TokenizerError(f"no id for {', '.join(missing)}: is this the tokenizer of a Kimi K3?")
        if not self.tokens.keys().isdisjoint(self.markup.values()):
            raise TokenizerError("an id stands for a special token and for text: fetch the tokenizer again")


class K3Tokenizer:
    """Encodes segments and decodes ids. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: Iterable[int] = ()) -> None:
        """Take a vocabulary, and ids that end a message beside those of `<|end_of_msg|>` and `[EOS]`."""
        markup = vocabulary.markup
        self.markup: Mapping[str, int] = MappingProxyType(dict(markup))
        """Every special token's text, and its id."""
        self.eos_ids = frozenset({markup[text] for text in EOS_MARKERS if text in markup} | set(eos_ids))
        self._vocabulary = vocabulary
        self._bytes = {**vocabulary.tokens, **{id: text.encode() for text, id in markup.items()}}
        self.vocab_size = max(self._bytes) + 1
        """Ids are below it."""
        longest_first = sorted(markup, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)))
        # Tag names and attribute punctuation make up half of a prompt's segments.
        self._encode_short = lru_cache(_CACHED_TEXTS)(self._encode)

    @classmethod
    def load(cls, path: Path) -> K3Tokenizer:
        """Read the tokenizer of a checkpoint directory. Raises `TokenizerError`."""
        if (ranks := path / "tiktoken.model").is_file():
            vocabulary = _read_tiktoken(ranks, _read_json(path / "tokenizer_config.json"))
        elif (content := path / "tokenizer.json").is_file():
            vocabulary = _read_tokenizer_json(_read_text(content), content)
        else:
            raise TokenizerError(
                f"{path} has neither tiktoken.model nor tokenizer.json: give a K3 checkpoint"
            )
        configs = (path / name for name in ("generation_config.json", "config.json"))
        return cls(vocabulary, {id for config in configs if config.is_file() for id in _eos_ids(config)})

    @classmethod
    def from_json(cls, content: str) -> K3Tokenizer:
        """Read the content of a `tokenizer.json`. Raises `TokenizerError`."""
        return cls(_read_tokenizer_json(content, Path("tokenizer.json")))

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Encode segments `(text, is_markup)` one by one, as `model.encoding` renders them."""
        ids: list[int] = []
        for text, is_markup in segments:
            ids += self._encode_markup(text) if is_markup else self.encode_text(text)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text: no id of `markup` comes out. A lone surrogate becomes U+FFFD."""
        if len(text) <= _CACHED_TEXT_CHARS:
            return list(self._encode_short(text))
        return list(self._encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens spelled out, bytes that are no UTF-8 as U+FFFD.

        Raises `KeyError` for an id outside the vocabulary.
        """
        return b"".join(map(self._bytes.__getitem__, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one id: a character may span several. Raises `KeyError` outside the vocabulary."""
        return self._bytes[id]

    def _encode(self, text: str) -> Sequence[int]:
        ids: list[int] = []
        for piece in _pieces(_without_surrogates(text)):
            ids += self._vocabulary.encode(piece)
        return ids

    def _encode_markup(self, text: str) -> list[int]:
        if (id := self.markup.get(text)) is not None:
            return [id]
        ids: list[int] = []
        end = 0
        for match in self._marker.finditer(text):
            ids += self.encode_text(text[end : match.start()])
            ids.append(self.markup[match.group()])
            end = match.end()
        return ids + self.encode_text(text[end:])


class IncrementalDecoder:
    """Decodes ids as they come, holding back the bytes of a character that is not complete yet.

    The texts of all calls, joined, equal `K3Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Text that the ids complete. Raises `KeyError` for an id outside the vocabulary."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        """U+FFFD for a character that never came complete, else nothing. The decoder is then as new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def byte_alphabet() -> dict[int, str]:
    """Printable character for every byte in a byte-level BPE vocabulary (GPT-2, `bytes_to_unicode`)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(256 + position) for position, byte in enumerate(others)}


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        chunk = text[start : start + MAX_ENCODE_CHARS]
        end = 0
        for run in _LONG_RUN.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[end:cut]
                end = cut
        yield chunk[end:]


def _without_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone ones, which JSON can spell but UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_tokenizer_json(content: str, path: Path) -> Vocabulary:
    import tokenizers  # one of the two libraries is enough

    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
        added: list[dict[str, Any]] = json.loads(content)["added_tokens"]
        to_byte = {character: byte for byte, character in byte_alphabet().items()}
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        tokens = {id: bytes(to_byte[c] for c in token) for token, id in vocabulary.items()}
        markup = {str(token["content"]): int(token["id"]) for token in added if token["special"]}
    except Exception as error:  # the library raises bare exceptions for a file that it cannot read
        raise TokenizerError(f"{path} is no byte-level tokenizer.json: {error}; fetch it again") from error
    tokenizer.encode_special_tokens = True  # text that spells a special token stays text
    return Vocabulary(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokens=tokens, markup=markup
    )


def _read_tiktoken(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    import tiktoken  # one of the two libraries is enough

    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is no list of tokens and ranks: {error}; fetch it again") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path} does not rank its tokens from 0 without a gap; fetch it again")
    named: dict[str, Any] = config.get("added_tokens_decoder", {})
    ids = range(len(ranks), len(ranks) + SPECIAL_TOKENS)
    markup = {str(named.get(str(id), {}).get("content", f"<|reserved_token_{id}|>")): id for id in ids}
    encoding = tiktoken.Encoding("kimi-k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return Vocabulary(
        encoding.encode_ordinary, tokens={id: token for token, id in ranks.items()}, markup=markup
    )


def _eos_ids(path: Path) -> set[int]:
    config = _read_json(path)
    inner: Mapping[str, Any] = config.get("text_config") or {}
    ids: set[int] = set()
    for value in (config.get("eos_token_id"), inner.get("eos_token_id")):
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, list):
            ids.update(int(id) for id in cast("list[int]", value))
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is no JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is no JSON object; fetch it again")
    return cast("dict[str, Any]", content)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; give a K3 checkpoint") from error
