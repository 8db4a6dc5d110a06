"""Messages to token ids: whole prompts, and what a prompt adds to the tokens of a recorded turn.

Both are made of the same parts, encoded alone, so a prompt rendered as a whole equals the head plus its
pieces.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from model.encoding import (
    IMAGE_PLACEHOLDER,
    EncodingError,
    Segment,
    generation_segments,
    head_segments,
    message_segments,
    messages_segments,
    tail_segments,
)
from model.tokenizer import K3Tokenizer
from service.conversation import Conversation, Message
from service.digest import calls_of

_CLOSING_TAG: Final = 3
"""Segments of a closing tag, and of an opening one without attributes."""
_END: Final = _CLOSING_TAG + 1
"""Segments that end a message: its closing tag and `<|end_of_msg|>`."""
_HEADS_KEPT: Final = 32
_UNRESOLVED: Final = (IMAGE_PLACEHOLDER, True)
IMAGE: Final = "<|media_pad|>"
"""The prompt of an image, from which SGLang makes as many tokens as the image has."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids, the (start, length) of the part that speaks for this turn only, and where they leave off."""

    ids: list[int]
    tail: tuple[int, int]
    channel: Literal["think", "response"]


class Renderer:
    """Renders with one tokenizer. Safe to call from threads."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.image_id = tokenizer.markup[IMAGE]
        self._head_ids = lru_cache(_HEADS_KEPT)(self._encode_head)

    def render(self, conversation: Conversation, head: bytes, start: int) -> Rendered:
        """What stands after the first `start` messages; the head too when it is 0.

        `head` is a digest of the head. Raises `EncodingError` with the path in the whole request.
        """
        messages = conversation.messages[:-1] if conversation.partial else conversation.messages
        ids = list(self._head_ids(head, _Head(conversation))) if start == 0 else []
        ids += self._encode(_messages(messages, start, conversation.thinking))
        tail = self._encode(
            tail_segments(
                # SGLang drops the tool choice of a request without tools.
                conversation.tool_choice if conversation.tools else None,
                conversation.response_format,
            )
        )
        opening, channel = _opening(conversation)
        return Rendered([*ids, *tail, *self._encode(opening)], (len(ids), len(tail)), channel)

    def _encode_head(self, digest: bytes, head: "_Head") -> list[int]:
        del digest  # the key of the cache
        conversation = head.conversation
        return self._encode(
            head_segments(
                conversation.tools, thinking=conversation.thinking, thinking_effort=conversation.effort
            )
        )

    def _encode(self, segments: Iterable[Segment]) -> list[int]:
        return self._tokenizer.encode_segments(segments)


class _Head:
    """A conversation as an argument that the cache takes for equal: the digest beside it is the key."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Head)

    def __hash__(self) -> int:
        return 0


def _messages(messages: Sequence[Message], start: int, thinking: bool) -> list[Segment]:
    calls = calls_of(messages[start - 1]) if start else ()
    try:
        segments = messages_segments(messages[start:], thinking=thinking, calls=calls)
    except EncodingError as error:
        field = re.sub(r"^messages\[(\d+)\]", lambda found: f"messages[{int(found[1]) + start}]", error.field)
        raise EncodingError(field, error.problem) from error
    # An image's part alone is markup: text that spells the placeholder stays text.
    return [(IMAGE, True) if segment == _UNRESOLVED else segment for segment in segments]


def _opening(conversation: Conversation) -> tuple[list[Segment], Literal["think", "response"]]:
    """The message that the model is to write, up to where it goes on."""
    plain = "think" if conversation.thinking else "response"
    if not conversation.partial:
        return generation_segments(conversation.thinking), plain
    message = conversation.messages[-1]
    field = f"messages[{len(conversation.messages) - 1}]"
    if message.get("tool_calls"):
        raise EncodingError(f"{field}.tool_calls", "cannot be continued; leave `partial` out")
    segments = message_segments(message, thinking=conversation.thinking, field=field)
    segments = segments[: -_END - _CLOSING_TAG]
    if conversation.thinking and not message.get("content"):
        # Nothing is answered yet: it is the reasoning that goes on.
        return segments[: -2 * _CLOSING_TAG], "think"
    return segments, "response"
