"""Anthropic Messages: requests in.

Source: https://platform.claude.com/docs/en/api/messages, and what Claude Code, the Anthropic SDKs and the
frameworks upon them send. What a field may hold, and what is ignored, is in the README of this package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.chat_request import named_tool
from service.conversation import Conversation
from service.fields import Fields
from service.messages_conversation import ConversationReader, Retention
from service.sampling import Sampling, read_sampling

EFFORTS: Final[Mapping[str, str]] = {
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""K3's effort for `output_config.effort`: K3 knows low, high and max; others go to the nearest, upwards."""

_BUDGETS: Final = ((2_048, "low"), (16_384, "high"))
"""K3's effort for a thinking budget below so many tokens, when no effort is given; `max` from there on."""

_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos")
_MANY_TOKENS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request to `/v1/messages`. `model` None: whatever the engine serves.

    retention: the longest that any `cache_control` stands for; None when there is none.
    ttl: the longest that any asks for in so many words.
    show_thinking: False when the client wants no more of the thinking than its signature.
    """

    model: str | None
    conversation: Conversation
    sampling: Sampling
    stream: bool
    single_call: bool
    retention: Retention | None
    ttl: Retention | None
    show_thinking: bool


def read_messages_request(
    fields: Fields,
    defaults: Mapping[str, float],
    vocabulary: int,
    turn_of: Callable[[str], str | None],
) -> MessagesRequest:
    """Read the body of a request. Raises InvalidRequest.

    `defaults` are for sampling; `turn_of` gives the key of the turn that a signature names, or None.
    """
    reader = ConversationReader(turn_of)
    tools = tuple(reader.tools(fields))
    messages = [*reader.system(fields), *reader.messages(fields)]
    tool_choice, single_call = _tool_choice(fields, tools)
    thinking, effort, show_thinking = _thinking(fields)
    reader.cache_control(fields)
    sampled = {name: fields.values.get(name) for name in (*_SAMPLING, "max_tokens", "stop_sequences")}
    return MessagesRequest(
        model=fields.string("model"),
        conversation=Conversation(
            messages=tuple(messages),
            tools=tools,
            thinking=thinking,
            effort=effort,
            tool_choice=tool_choice,
            response_format=_response_format(fields),
            partial=messages[-1]["role"] == "assistant",
        ),
        sampling=read_sampling(Fields(sampled), defaults, vocabulary, stops="stop_sequences"),
        stream=fields.boolean("stream") or False,
        single_call=single_call,
        retention=reader.retention,
        ttl=reader.ttl,
        show_thinking=show_thinking,
    )


def _tool_choice(
    fields: Fields, tools: tuple[Mapping[str, Any], ...]
) -> tuple[str | Mapping[str, Any] | None, bool]:
    """The tool choice in the terms of Chat Completions, and whether only one call may be made."""
    choice = fields.nested("tool_choice")
    if choice is None:
        return None, False
    single_call = choice.boolean("disable_parallel_tool_use") or False
    kind = choice.string("type", choices=("auto", "any", "tool", "none"))
    match kind:
        case "auto":
            return None, single_call
        case "none":
            return "none" if tools else None, single_call
        case "any":
            if not tools:
                raise fields.error("tool_choice", "needs tools: give at least one, or leave tool_choice out.")
            return "required", single_call
        case "tool":
            return named_tool(choice, choice.required_string("name"), tools), single_call
        case _:
            raise choice.error("type", "is required: auto, any, tool or none.")


def _thinking(fields: Fields) -> tuple[bool, str | None, bool]:
    """Whether to think, how hard, and whether to show it: by `output_config.effort` and `thinking`."""
    effort: str | None = None
    if (config := fields.nested("output_config")) is not None:
        given = config.string("effort", choices=tuple(EFFORTS))
        effort = None if given is None else EFFORTS[given]
    thinking = fields.nested("thinking")
    if thinking is None:
        return True, effort, True
    kind = thinking.string("type", choices=("enabled", "adaptive", "disabled"))
    if kind is None:
        raise thinking.error("type", "is required: enabled, adaptive or disabled.")
    budget = thinking.integer("budget_tokens", 0, _MANY_TOKENS)
    shown = thinking.string("display", choices=("summarized", "omitted")) != "omitted"
    if kind == "disabled":
        return False, None, shown
    if effort is None and budget is not None:
        effort = next((effort for below, effort in _BUDGETS if budget < below), "max")
    return True, effort, shown


def _response_format(fields: Fields) -> Mapping[str, Any] | None:
    """`output_config.format`, or the older `output_format`."""
    config = fields.nested("output_config")
    output_format = config.nested("format") if config is not None else None
    output_format = output_format or fields.nested("output_format")
    if output_format is None:
        return None
    if output_format.string("type") != "json_schema":
        raise output_format.error("type", "must be json_schema.")
    schema = output_format.nested("schema")
    if schema is None:
        raise output_format.error("schema", "is required: give a JSON schema.")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema.values}}
