"""What passes between the wire formats, the prompt assembly and the ledger: conversations and completions.

Plain values without I/O. Every API (Chat Completions, Responses, Messages) is turned into a `Conversation`
on its way in and is answered from a `Completion` on its way out.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""An OpenAI Chat Completions message: role, content (str, parts or None), reasoning_content, tool_calls
[{id, type, function: {name, arguments: str}}], tool_call_id, name. Role `developer` is already `system`. An
assistant's `turn` is the ledger's key of the turn that wrote it, where a signature of ours says so."""

Finish = Literal["stop", "length", "tool_calls", "abort"]


def mint_call_id() -> str:
    """A new tool call id: opaque, unguessable (120 bits), over `[A-Za-z0-9_]` so that clients keep it."""
    return f"call_{secrets.token_hex(15)}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request for the model's next message, in the terms of Chat Completions.

    `effort` is low, high or max, or None for the model's default; it counts only when `thinking`.
    `partial` says that the last message is an assistant message which the model is to continue.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    effort: str | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        assert self.messages, "a conversation has at least one message"
        assert not self.partial or self.messages[-1]["role"] == "assistant", (
            "partial continues an assistant message"
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model. `arguments` is the JSON text as it was streamed to the client."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one turn; `cached_*` say from which tier the engine took the prompt's prefix."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, over all tiers."""
        return self.cached_device_tokens + self.cached_host_tokens + self.cached_storage_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's message: what a client sees of it, and the token ids exactly as sampled.

    `closing` are the ids that close what the sampler left open (cut by length, a stop string or an abort);
    empty when the message ended by itself. They were not sampled, and stand after `ids` in the next prompt.
    """

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage = field(default_factory=Usage)
    closing: tuple[int, ...] = ()

    def message(self) -> dict[str, Any]:
        """The assistant message that a client which keeps everything sends back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message
