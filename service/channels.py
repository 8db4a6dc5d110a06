"""K3's output channels, parsed token by token into reasoning, text and tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from model.tokenizer import K3Tokenizer
from service.conversation import Completion, Finish, Usage, mint_call_id

Channel = Literal["think", "response", "message"]
"""Where the generation prompt left off: inside `think` or `response`, or in the message before any channel."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the `think` channel."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the `response` channel."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the message's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; the fragments of one call joined are its JSON text."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are complete."""

    index: int


ChannelEvent = ReasoningDelta | TextDelta | CallStart | CallArguments | CallEnd


class ChannelParser:
    """Token ids in, events out; structure is decided by token id alone, whatever the text spells."""

    def __init__(
        self,
        tokenizer: K3Tokenizer,
        *,
        channel: Channel = "think",
        mint_call_id: Callable[[], str] = mint_call_id,
    ) -> None:
        raise NotImplementedError

    def feed(self, ids: Sequence[int]) -> list[ChannelEvent]:
        """Take the next sampled ids (any number, special ones included). Never raises on malformed structure."""
        raise NotImplementedError

    def finish(self) -> list[ChannelEvent]:
        """The last events, once no more ids come. Calling it again gives nothing."""
        raise NotImplementedError

    def completion(self, finish: Finish, usage: Usage | None = None) -> Completion:
        """Everything that was parsed. A `stop` of a message with calls is returned as `tool_calls`."""
        raise NotImplementedError
