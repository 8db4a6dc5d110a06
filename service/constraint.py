"""What the engine must not be free to sample: forced calls, strict tools, JSON answers. As structural tags.

A tag (xgrammar's) covers the message from its first token to its last, the think channel included, so that
nothing can run free before what is forced; SGLang's own way (`require_reasoning`) waits for an end of the
reasoning that may never come. Thinking is kept, but bounded (`thinking_budget`). Before a forced call the
response channel stands empty, as K3 writes a call without words.

Where a tool is `strict` and nothing is forced, the tag is K3's message as it is: thinking and text of any
length, then calls or none. Within a call of a strict tool the schema binds from its first argument on; other
tools' calls are free in their arguments, not in their form.

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

_NO_SCHEMA: Final = (TypeError, AttributeError, KeyError, ValueError, RecursionError)
"""What comes of reading as a JSON schema what is none: whoever reads one trusts its keywords."""

MAX_THINKING_TOKENS: Final = 8192
"""Most tokens that a constrained turn thinks."""

_ANYTHING: Final = {"type": "object", "properties": {}, "additionalProperties": True}

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
    forced = _forced_tools(conversation)
    schema = _answer_schema(conversation.response_format)
    budget_tokens: int | None = thinking_budget(max_tokens)
    if forced:
        answer = [*_response(channel, []), _calls(forced, single_call)]
    elif schema is not None:
        value: Format = {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": MAX_WHITESPACE_CHARS,
        }
        answer = _response(channel, [value])
        if conversation.tools and conversation.tool_choice != "none":
            calls = _calls(_loosened(conversation.tools), single_call)
            answer = [_either(_sequence(answer), _sequence([*_response(channel, []), calls]))]
    elif conversation.tool_choice != "none" and any(map(_is_strict, conversation.tools)):
        budget_tokens = None
        calls = _calls(_loosened(conversation.tools), single_call)
        answer = [*_response(channel, [_any_text(tokenizer)]), {"type": "optional", "content": calls}]
    else:
        return {}
    thinking = _thinking(tokenizer, budget_tokens) if channel == "think" else []
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


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _loosened(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools, those that are not strict with any arguments."""
    return [
        tool
        if _is_strict(tool)
        else {"function": {"name": tool["function"]["name"], "parameters": _ANYTHING}}
        for tool in tools
    ]


def _calls(tools: Sequence[Mapping[str, Any]], single_call: bool) -> Format:
    try:
        return tool_calls_format(tools, not single_call)
    except StructureError as error:
        raise InvalidRequest(str(error), param="tools", code="invalid_schema") from None
    except _NO_SCHEMA:
        names = [tool["function"]["name"] for tool in tools if not _has_structure(tool)]
        raise InvalidRequest(
            f"tools: the parameters of {', '.join(names)[:200]} are no JSON schema: a keyword has a value of "
            "the wrong type.",
            param="tools",
            code="invalid_schema",
        ) from None


def _has_structure(tool: Mapping[str, Any]) -> bool:
    try:
        tool_calls_format([tool])
    except _NO_SCHEMA:
        return False
    return True


def _thinking(tokenizer: K3Tokenizer, budget_tokens: int | None) -> list[Format]:
    """The rest of the think channel, which the generation prompt has opened."""
    bound = {} if budget_tokens is None else {"max_tokens": budget_tokens}
    return [{**_any_text(tokenizer), **bound}, *_marked(CLOSE, "think")]


def _any_text(tokenizer: K3Tokenizer) -> Format:
    return {"type": "any_tokens", "exclude_tokens": sorted(tokenizer.markup.values())}


def _response(channel: Channel, content: Sequence[Format]) -> list[Format]:
    opening = [] if channel == "response" else _marked(OPEN, "response")
    return [*opening, *content, *_marked(CLOSE, "response")]


def _marked(marker: str, name: str) -> list[Format]:
    return [_token(marker), {"type": "const_string", "value": name}, _token(SEP)]


def _token(marker: str) -> Format:
    return {"type": "token", "token": marker}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _sequence(elements: Sequence[Format]) -> Format:
    return {"type": "sequence", "elements": list(elements)}
