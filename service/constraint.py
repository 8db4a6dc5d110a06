"""What the engine must not be free to sample: forced tool calls and JSON answers, as structural tags.

A tag (xgrammar's) covers the message from its first token to its last, the think channel included, so that
nothing can run free before what is forced; SGLang's own way (`require_reasoning`) waits for an end of the
reasoning that may never come. Thinking is kept, but bounded (`thinking_budget`). Before a forced call the
response channel stands empty, as K3 writes a call without words.

Markers stand in a tag as tokens. A tag that spells them would also take their spelling in ordinary tokens,
and that is text to everybody who decides structure by id.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from model.encoding import CLOSE, OPEN, SEP
from model.structure import Format, StructureError, tool_calls_format
from model.tokenizer import K3Tokenizer
from service.channels import Channel
from service.conversation import Conversation
from service.errors import InvalidRequest

MAX_THINKING_TOKENS: Final = 8192
"""Most tokens that a constrained turn thinks."""

MAX_WHITESPACE_CHARS: Final = 16
"""Longest run of white space in a constrained JSON text: enough to indent, too little to get lost in."""


def output_constraint(
    conversation: Conversation,
    channel: Channel,
    tokenizer: K3Tokenizer,
    *,
    max_tokens: int,
    single_call: bool,
) -> dict[str, str]:
    """The entry of SGLang's `sampling_params` that a conversation asks for; empty when nothing is forced.

    Raises InvalidRequest for tools that no grammar can be made of.
    """
    tools = _forced_tools(conversation)
    schema = _answer_schema(conversation.response_format)
    if tools:
        try:
            calls = tool_calls_format(tools, not single_call)
        except StructureError as error:
            raise InvalidRequest(str(error), param="tools", code="invalid_schema") from None
        answer = [*_response(channel, []), calls]
    elif schema is not None:
        value: Format = {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": MAX_WHITESPACE_CHARS,
        }
        answer = _response(channel, [value])
        if conversation.tools and conversation.tool_choice != "none":
            answer = [_either(_sequence(answer), _sequence(_free_calls(channel, tokenizer)))]
    else:
        return {}
    thinking = _thinking(tokenizer, thinking_budget(max_tokens)) if channel == "think" else []
    tag = {"type": "structural_tag", "format": _sequence([*thinking, *answer, *_marked(CLOSE, "message")])}
    return {"structural_tag": orjson.dumps(tag).decode()}


def thinking_budget(output_tokens: int) -> int:
    """How long a constrained turn may think: at most half of its tokens, so that the answer has a chance.

    A power of two (or 0), since every other value costs the engine another compilation.
    """
    half = min(output_tokens // 2, MAX_THINKING_TOKENS)
    return 1 << (half.bit_length() - 1) if half else 0


def _forced_tools(conversation: Conversation) -> Sequence[Mapping[str, Any]]:
    match conversation.tool_choice:
        case "required":
            return conversation.tools
        case {"function": {"name": name}}:
            return [tool for tool in conversation.tools if tool["function"]["name"] == name]
        case _:
            return ()


def _answer_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    match response_format:
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
        case _:
            return None


def _thinking(tokenizer: K3Tokenizer, budget_tokens: int) -> list[Format]:
    """The rest of the think channel, which the generation prompt has opened."""
    text = {
        "type": "any_tokens",
        "exclude_tokens": sorted(tokenizer.markup.values()),
        "max_tokens": budget_tokens,
    }
    return [text, *_marked(CLOSE, "think")]


def _response(channel: Channel, content: Sequence[Format]) -> list[Format]:
    opening = [] if channel == "response" else _marked(OPEN, "response")
    return [*opening, *content, *_marked(CLOSE, "response")]


def _free_calls(channel: Channel, tokenizer: K3Tokenizer) -> list[Format]:
    """Calls instead of the answer, as a model that may call tools is free to choose."""
    inside = {"type": "any_tokens", "exclude_tokens": sorted(tokenizer.eos_ids)}
    return [*_response(channel, []), *_marked(OPEN, "tools"), inside, *_marked(CLOSE, "tools")]


def _marked(marker: str, name: str) -> list[Format]:
    return [_token(marker), {"type": "const_string", "value": name}, _token(SEP)]


def _token(marker: str) -> Format:
    return {"type": "token", "token": marker}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}
