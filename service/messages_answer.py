"""Anthropic Messages: answers out, whole and as events.

Dictionaries in the shapes of the anthropic package's models, against which the tests hold them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import orjson

from service.channels import CallArguments, CallEnd, CallStart, ChannelEvent, ReasoningDelta, TextDelta
from service.conversation import Completion, ToolCall, Usage
from service.errors import ContextTooLong, EngineOverloaded, ServiceError
from service.messages_conversation import Retention
from service.reader import Step
from service.stream import named_event

PING: Final = named_event({"type": "ping"})
PAGE_TOKENS: Final = 64
"""The engine keeps whole pages of this many tokens (`--page-size` of every profile)."""

STATUS_OVERLOADED: Final = 529
"""Anthropic's status for what is overloaded as a whole; its clients wait and ask again."""

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

Block = Literal["thinking", "text", "tool_use"]


def error_status(error: ServiceError) -> int:
    """The HTTP status of an error in this API."""
    return STATUS_OVERLOADED if isinstance(error, EngineOverloaded) else error.status


def error_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """Anthropic's shape of an error, which is also the event of a stream that breaks off."""
    message = error.message
    if isinstance(error, ContextTooLong):
        # Claude Code reads the two numbers out of these very words, and compacts its history.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit_tokens} maximum"
    if isinstance(error, EngineOverloaded):
        kind = "overloaded_error"
    elif error.status < 500:
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    else:
        kind = "api_error"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def usage_body(usage: Usage, retention: Retention | None) -> dict[str, Any]:
    """Anthropic's shape of the token counts; the three kinds of input tokens sum up to the prompt's.

    Read from the cache: what the engine took from any of its tiers. Written to it, counted where the request
    has a `cache_control`: the whole pages that were computed. Everything else is plain input.
    """
    read = usage.cached_tokens
    kept = usage.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS if retention else 0
    written = max(0, kept - read)
    return {
        "input_tokens": usage.prompt_tokens - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written if retention == "5m" else 0,
            "ephemeral_1h_input_tokens": written if retention == "1h" else 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }


class MessagesAnswer:
    """One answer. `signature` is the turn's, `max_tokens` what the request asked for."""

    def __init__(
        self,
        id: str,
        model: str,
        *,
        signature: str,
        retention: Retention | None,
        show_thinking: bool,
        max_tokens: int | None,
    ) -> None:
        self._head: dict[str, Any] = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._signature = signature
        self._retention: Retention | None = retention
        self._show_thinking = show_thinking
        self._max_tokens = max_tokens
        self._index = -1
        self._open: Block | None = None

    def whole(self, completion: Completion, stop_string: str | None) -> dict[str, Any]:
        """The answer in one piece."""
        content: list[dict[str, Any]] = []
        if completion.reasoning:
            thinking = completion.reasoning if self._show_thinking else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": self._signature})
        if completion.text:
            content.append({"type": "text", "text": completion.text})
        content += [_tool_use(call) for call in completion.calls]
        return {
            **self._head,
            "content": content,
            **self._ending(completion, stop_string),
            "usage": usage_body(completion.usage, self._retention),
        }

    def first_event(self, usage: Usage) -> dict[str, Any]:
        """What a stream opens with; `usage` as far as it is known."""
        message = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(usage, self._retention),
        }
        return {"type": "message_start", "message": message}

    def events(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of one step."""
        for event in step.events:
            yield from self._events_of(event)

    def last_events(self, completion: Completion, stop_string: str | None) -> Iterator[dict[str, Any]]:
        """The end of the open block, why the message ended, the usage, and the end."""
        yield from self._close()
        yield {
            "type": "message_delta",
            "delta": self._ending(completion, stop_string),
            "usage": usage_body(completion.usage, self._retention),
        }
        yield {"type": "message_stop"}

    def _events_of(self, event: ChannelEvent) -> Iterator[dict[str, Any]]:
        match event:
            case ReasoningDelta(text):
                yield from self._enter("thinking", {"thinking": "", "signature": ""})
                if self._show_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case TextDelta(text):
                yield from self._enter("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallStart(_, id, name):
                yield from self._close()
                yield from self._enter("tool_use", {"id": id, "name": name, "input": {}})
            case CallArguments(_, fragment):
                yield self._delta({"type": "input_json_delta", "partial_json": fragment})
            case CallEnd():
                yield from self._close()

    def _enter(self, block: Block, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == block:
            return
        yield from self._close()
        self._open = block
        self._index += 1
        start = {"type": block, **fields}
        yield {"type": "content_block_start", "index": self._index, "content_block": start}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _ending(self, completion: Completion, stop_string: str | None) -> dict[str, Any]:
        reason = _STOP_REASONS.get(completion.finish, "end_turn")
        if stop_string is not None:
            reason = "stop_sequence"
        elif completion.finish == "length" and (
            self._max_tokens is None or completion.usage.completion_tokens < self._max_tokens
        ):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop_string}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """A call as a block. Arguments pass as they were written, so that no number in them changes.

    `input` is an object: arguments that are none, such as those of a call that was cut, are left out, as the
    SDKs do with a stream that ends within them.
    """
    try:
        is_object = isinstance(json.loads(call.arguments, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        is_object = False
    arguments = orjson.Fragment(call.arguments) if is_object else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
