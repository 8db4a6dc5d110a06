"""Training documents: sessions and source text as token ids, each token with its kind."""

import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.encoding import CLOSE, OPEN, Segment, generation_segments, head_segments, messages_segments
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tokenizer import K3Tokenizer

_TEXT_SHARE: Final = 0.04
_CACHED_CHARS: Final = 48
_CACHED_TEXTS: Final = 400_000
_SOURCE_BYTES: Final = (2_000, 60_000)
_EFFORTS: Final = (None, None, None, "low", "high", "max")


class Kind(IntEnum):
    """What a token belongs to. `CHOICE` is reasoning that nothing determines."""

    CONTEXT = 0
    THINK = 1
    RESPONSE = 2
    CALL = 3
    ARGUMENT = 4
    RESULT = 5
    TEXT = 6
    CHOICE = 7


WRITTEN: Final = (Kind.THINK, Kind.RESPONSE, Kind.CALL, Kind.ARGUMENT, Kind.CHOICE)
"""What the model writes."""
WEIGHTS: Final[Mapping[Kind, float]] = {
    Kind.CONTEXT: 0.05,
    Kind.THINK: 1.0,
    Kind.RESPONSE: 1.0,
    Kind.CALL: 1.0,
    Kind.ARGUMENT: 1.0,
    Kind.RESULT: 0.05,
    Kind.TEXT: 0.3,
    Kind.CHOICE: 0.3,
}
"""Loss weight of a token by its kind."""

_CHANNELS: Final = {
    "think": Kind.THINK,
    "response": Kind.RESPONSE,
    "tools": Kind.CALL,
    "call": Kind.CALL,
    "argument": Kind.ARGUMENT,
}


def kinds_of(message: Mapping[str, Any], segments: Sequence[Segment]) -> list[Kind]:
    """Kind of each segment of one message: those of an assistant message that the generation prompt holds are
    context, the others are what the model writes."""
    if message["role"] == "tool":
        return [Kind.RESULT] * len(segments)
    if message["role"] != "assistant":
        return [Kind.CONTEXT] * len(segments)
    given = len(generation_segments())
    kinds = [Kind.CONTEXT] * given
    kind, opened = Kind.THINK, ["think"]
    for (previous, was_markup), (text, is_markup) in pairwise(segments[given - 1 :]):
        if was_markup and not is_markup and previous == OPEN:
            opened.append(text)
            kind = _CHANNELS[text] if text != "argument" else Kind.CALL
        elif was_markup and not is_markup and previous == CLOSE:
            kind = _CHANNELS.get(text, kind)
            if opened and opened[-1] == text:
                opened.pop()
        elif not is_markup and opened and opened[-1] == "argument" and previous.endswith("<|sep|>"):
            kind = Kind.ARGUMENT
        kinds.append(kind)
    if message.get("is_free"):
        return [Kind.CHOICE if kind is Kind.THINK else kind for kind in kinds]
    return kinds


class Encoder:
    """Encodes segments with a memory for what recurs: most of a session's text does."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[Segment, list[int]] = {}

    def segment(self, segment: Segment) -> list[int]:
        """Ids of one segment."""
        if (ids := self._known.get(segment)) is None:
            ids = self._tokenizer.encode_segments([segment])
            if len(segment[0]) <= _CACHED_CHARS and len(self._known) < _CACHED_TEXTS:
                self._known[segment] = ids
        return ids


class Document:
    """Ids and kinds of a conversation as it grows."""

    def __init__(self, encoder: Encoder) -> None:
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self._encoder = encoder

    def add(self, segments: Iterable[Segment], kinds: Iterable[Kind]) -> None:
        """Append segments, each with the kind of its tokens."""
        for segment, kind in zip(segments, kinds, strict=True):
            ids = self._encoder.segment(segment)
            self.ids += ids
            self.kinds += [int(kind)] * len(ids)

    def add_head(self, tools: Sequence[Mapping[str, Any]], effort: str | None) -> None:
        """Append the tools and the effort."""
        segments = head_segments(tools, thinking_effort=effort)
        self.add(segments, [Kind.CONTEXT] * len(segments))

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append messages; tool results follow the message with their calls."""
        start = 0
        while start < len(messages):
            end = start + 1
            while (
                messages[start]["role"] == "tool" and end < len(messages) and messages[end]["role"] == "tool"
            ):
                end += 1
            calls = messages[start - 1].get("tool_calls", ()) if start else ()
            segments = messages_segments(messages[start:end], calls=calls)
            self.add(segments, kinds_of(messages[start], segments))
            start = end


def session_document(rng: Random, split: Split, encoder: Encoder, length: int) -> Document:
    """A session of at least `length` tokens."""
    document = Document(encoder)
    session = Session.draw(rng, split)
    document.add_head(session.environment.schema(), rng.choice(_EFFORTS))
    for messages in session.messages():
        document.add_messages(messages)
        if len(document.ids) >= length:
            return document
    raise AssertionError("a session has no end")


@cache
def source_files() -> tuple[Path, ...]:
    """Modules of the running interpreter's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    low, high = _SOURCE_BYTES
    found = (
        path
        for folder in (root, root / "json", root / "email", root / "asyncio")
        for path in folder.glob("*.py")
    )
    return tuple(sorted(path for path in found if low <= path.stat().st_size <= high))


def source_text(rng: Random) -> str:
    """One module of the standard library."""
    return rng.choice(source_files()).read_text(encoding="utf-8", errors="replace")


def source_document(rng: Random, encoder: Encoder, length: int) -> Document:
    """Modules one after another, at least `length` tokens."""
    document = Document(encoder)
    while len(document.ids) < length:
        document.add([(source_text(rng), False)], [Kind.TEXT])
    return document


def batch(
    seed: int, index: int, length: int, tokens: int, encoder: Encoder, split: Split = Split.TRAIN
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Batch `index` of a run: ids and kinds, `[tokens // length, length + 1]`; the same on every machine.

    (Source text differs between releases of Python.)
    """
    ids = np.empty((tokens // length, length + 1), np.int16)
    kinds = np.empty(ids.shape, np.uint8)
    for row in range(len(ids)):
        rng = Random(f"{seed}/{split}/{index}/{row}")
        if split is Split.TRAIN and rng.random() < _TEXT_SHARE:
            document = source_document(rng, encoder, length + 1)
        else:
            document = session_document(rng, split, encoder, length + 1)
        ids[row] = document.ids[: length + 1]
        kinds[row] = document.kinds[: length + 1]
    return ids, kinds


def corpus(seed: int, sessions: int, sources: int) -> Iterator[str]:
    """Texts to learn the vocabulary from: what sessions say, and source code."""
    for n in range(sessions):
        rng = Random(f"{seed}/vocabulary/{n}")
        session = Session.draw(rng, Split.TRAIN)
        yield from (text for text, is_markup in head_segments(session.environment.schema()) if not is_markup)
        for _, messages in zip(range(30), session.messages(), strict=False):
            yield from (text for text, is_markup in messages_segments(messages) if not is_markup)
    rng = Random(f"{seed}/vocabulary")
    for _ in range(sources):
        yield source_text(rng)
