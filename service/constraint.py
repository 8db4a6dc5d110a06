"""What the engine must not be free to sample: forced tool calls and JSON answers, as structural tags.

A tag (xgrammar's) covers the message from its first token, the think channel included, so that nothing can
run free before what is forced; SGLang's own way (`require_reasoning`) waits for an end of the reasoning that
may never come. Thinking is kept, but bounded (`thinking_budget`).

Markers stand in a tag as tokens. A tag that spells them would also take their spelling in ordinary tokens,
and that is text to everybody who decides structure by id.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from model.encoding import CLOSE, OPEN, SEP
from model.tokenizer import K3Tokenizer
from service.channels import Channel
from service.conversation import Conversation

MAX_THINKING_TOKENS: Final = 8192
"""Most tokens that a constrained turn thinks."""

MAX_WHITESPACE_CHARS: Final = 16
"""Longest run of white space in a constrained JSON text: enough to indent, too little to get lost in."""

Format = dict[str, Any]


def output_constraint(
    conversation: Conversation, channel: Channel, tokenizer: K3Tokenizer, max_tokens: int
) -> dict[str, str]:
    """The entry of SGLang's `sampling_params` that a conversation asks for; empty when nothing is forced."""
    answer = _answer(conversation, channel, tokenizer)
    if answer is None:
        return {}
    thinking = _thinking(tokenizer, thinking_budget(max_tokens)) if channel == "think" else []
    tag = {"type": "structural_tag", "format": _sequence([*thinking, *answer])}
    return {"structural_tag": orjson.dumps(tag).decode()}


def thinking_budget(output_tokens: int) -> int:
    """How long a constrained turn may think: at most half of its tokens, so that the answer has a chance.

    A power of two (or 0), since every other value costs the engine another compilation.
    """
    half = min(output_tokens // 2, MAX_THINKING_TOKENS)
    return 1 << (half.bit_length() - 1) if half else 0


def _answer(conversation: Conversation, channel: Channel, tokenizer: K3Tokenizer) -> list[Format] | None:
    """What stands behind the think channel, up to the message's end; None when it is free."""
    schema = _answer_schema(conversation.response_format)
    if schema is None:
        return None
    markup = tokenizer.markup
    opening = [] if channel == "response" else _marked(markup, OPEN, "response")
    value = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE_CHARS}
    closing = [*_marked(markup, CLOSE, "response"), *_marked(markup, CLOSE, "message")]
    return [*opening, value, *closing]


def _answer_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | bool | None:
    match response_format:
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
        case _:
            return None


def _thinking(tokenizer: K3Tokenizer, budget_tokens: int) -> list[Format]:
    """The rest of the think channel, which the generation prompt has opened."""
    return [
        {
            "type": "any_tokens",
            "exclude_tokens": sorted(tokenizer.markup.values()),
            "max_tokens": budget_tokens,
        },
        *_marked(tokenizer.markup, CLOSE, "think"),
    ]


def _marked(markup: Mapping[str, int], marker: str, name: str) -> list[Format]:
    return [
        {"type": "token", "token": markup[marker]},
        {"type": "const_string", "value": name},
        {"type": "token", "token": markup[SEP]},
    ]


def _sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}
