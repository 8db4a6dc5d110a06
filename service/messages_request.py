"""Anthropic Messages: requests in.

Source: https://platform.claude.com/docs/en/api/messages, and what Claude Code, the Anthropic SDKs and the
frameworks upon them send. What a field may hold, and what is ignored, is in the README of this package.

A conversation is what a client of Chat Completions would have sent for it, so a session can go on over the
other API:

- system blocks are one leading system message, one block a line;
- a user message's tool results become tool messages, in their places between the rest;
- an assistant message's thinking, text and tool uses become reasoning, content and calls of one message;
- a tool's input is its arguments as JSON;
- tools with `defer_loading` are declared where a tool result first refers to them, by a system message of
  K3's own for that, so the head of the prompt stays what it was.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from service.conversation import Conversation
from service.fields import Fields
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

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""How the first system block of Claude Code begins. It differs between releases and requests."""

Retention = Literal["5m", "1h"]
"""How long a client wants its prefix to be kept, by `cache_control.ttl`."""

_ROLES: Final = ("user", "assistant", "system")
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
    reader = _Reader(turn_of)
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


class _Reader:
    """Reads messages one after the other, since a tool result depends on the calls before it."""

    def __init__(self, turn_of: Callable[[str], str | None]) -> None:
        self.retention: Retention | None = None
        self.ttl: Retention | None = None
        self._turn_of = turn_of
        self._call_ids: set[str] = set()
        self._deferred: dict[str, Mapping[str, Any]] = {}
        self._loaded: list[Mapping[str, Any]] = []

    def tools(self, fields: Fields) -> Iterator[Mapping[str, Any]]:
        """The tools that are declared from the beginning, as functions of Chat Completions."""
        for entry in fields.entries("tools"):
            tool = self._tool(entry)
            if entry.boolean("defer_loading"):
                self._deferred[tool["function"]["name"]] = tool
            else:
                yield tool

    def system(self, fields: Fields) -> Iterator[dict[str, Any]]:
        """The system prompt, if there is one, without Claude Code's billing header."""
        system = fields.values.get("system")
        if isinstance(system, str):
            texts = [system]
        else:
            texts = [self._text(block) for block in fields.entries("system")]
            if texts and texts[0].startswith(BILLING_HEADER):
                del texts[0]
        if text := "\n".join(texts):
            yield {"role": "system", "content": text}

    def messages(self, fields: Fields) -> Iterator[dict[str, Any]]:
        """All messages in the terms of Chat Completions."""
        entries = fields.entries("messages")
        if not entries:
            raise fields.error("messages", "is required: give at least one message.")
        for position, entry in enumerate(entries):
            match entry.string("role"):
                case "user":
                    yield from self._user(entry)
                case "assistant":
                    message = self._assistant(entry)
                    if position == len(entries) - 1 and message.get("tool_calls"):
                        raise entry.error(
                            "content", "ends with a tool_use: send its tool_result in a user message."
                        )
                    yield message
                case "system":
                    yield {"role": "system", "content": self._parts(entry)}
                case _:
                    raise entry.error("role", f"must be one of {', '.join(_ROLES)}.")

    def cache_control(self, entry: Fields) -> None:
        """Note how long this block's prefix is to be kept.

        Without a `ttl` it is a mark that agents set on every request, and no wish to have anything dropped
        after five minutes: it counts as `5m` in the usage, and the service keeps what it always keeps.
        """
        control = entry.nested("cache_control")
        if control is None:
            return
        control.string("type", choices=("ephemeral",))
        ttl = control.string("ttl", choices=("5m", "1h"))
        self.retention = "1h" if ttl == "1h" or self.retention == "1h" else "5m"
        if ttl is not None:
            self.ttl = self.retention

    def _tool(self, tool: Fields) -> Mapping[str, Any]:
        kind = tool.string("type")
        if kind is not None and kind != "custom":
            raise tool.error(
                "type", f"{kind[:40]!r} is not supported: give a custom tool with name and input_schema."
            )
        function: dict[str, Any] = {"name": tool.required_string("name")}
        if (description := tool.string("description")) is not None:
            function["description"] = description
        schema = tool.nested("input_schema")
        if schema is None:
            raise tool.error("input_schema", "is required: give a JSON schema of type object.")
        function["parameters"] = schema.values
        if (strict := tool.boolean("strict")) is not None:
            function["strict"] = strict
        self.cache_control(tool)
        return {"type": "function", "function": function}

    def _user(self, entry: Fields) -> Iterator[dict[str, Any]]:
        content = entry.values.get("content")
        if content is None or isinstance(content, str):
            yield {"role": "user", "content": content or ""}
            return
        parts: list[dict[str, Any]] = []
        blocks = entry.entries("content")
        for block in blocks:
            if block.string("type") == "tool_result":
                if parts:
                    yield {"role": "user", "content": parts}
                    parts = []
                yield self._tool_result(block)
            else:
                yield from self._declaration()
                parts.append({"type": "text", "text": self._text(block)})
        yield from self._declaration()
        if parts or not blocks:
            yield {"role": "user", "content": parts}

    def _tool_result(self, block: Fields) -> dict[str, Any]:
        """A tool's result. K3 has no mark for `is_error`: what went wrong is what the content says."""
        id = block.required_string("tool_use_id")
        if id not in self._call_ids:
            raise block.error(
                "tool_use_id", "answers no tool_use of the assistant message before it: send that one too."
            )
        block.boolean("is_error")
        self.cache_control(block)
        return {"role": "tool", "tool_call_id": id, "content": self._parts(block, references=True)}

    def _declaration(self) -> Iterator[dict[str, Any]]:
        """The tools that results have referred to since the last time."""
        if self._loaded:
            yield {"role": "system", "content": "", "tools": self._loaded}
            self._loaded = []

    def _reference(self, block: Fields) -> str:
        """What stands for a reference to a tool, which is declared after the results if it was deferred."""
        name = block.required_string("tool_name")
        if (tool := self._deferred.pop(name, None)) is not None:
            self._loaded.append(tool)
        return f"{name}\n"

    def _assistant(self, entry: Fields) -> dict[str, Any]:
        content = entry.values.get("content")
        self._call_ids = set()
        if content is None or isinstance(content, str):
            return {"role": "assistant", "content": content or ""}
        reasoning: list[str] = []
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        message: dict[str, Any] = {"role": "assistant", "content": parts}
        for block in entry.entries("content"):
            match block.string("type"):
                case "thinking":
                    reasoning.append(block.string("thinking") or "")
                    if turn := self._turn_of(block.string("signature") or ""):
                        message["turn"] = turn
                case "redacted_thinking":
                    pass  # another service's; it holds nothing that could be read
                case "tool_use":
                    calls.append(self._tool_use(block))
                case _:
                    parts.append({"type": "text", "text": self._text(block)})
        if text := "".join(reasoning):
            message["reasoning_content"] = text
        if calls:
            message["tool_calls"] = calls
        return message

    def _tool_use(self, block: Fields) -> dict[str, Any]:
        id = block.required_string("id")
        name = block.required_string("name")
        value = block.nested("input")
        self.cache_control(block)
        try:
            arguments = json.dumps({} if value is None else value.values, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise block.error("input", "holds a number that JSON can't write: send it as a string.") from None
        self._call_ids.add(id)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _parts(self, entry: Fields, *, references: bool = False) -> str | list[dict[str, Any]]:
        content = entry.values.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        parts: list[dict[str, Any]] = []
        for block in entry.entries("content"):
            refers = references and block.string("type") == "tool_reference"
            parts.append({"type": "text", "text": self._reference(block) if refers else self._text(block)})
        return parts

    def _text(self, block: Fields) -> str:
        kind = block.required_string("type")
        if kind != "text":
            raise block.error(
                "type",
                f"blocks of type {kind[:40]!r} are not supported here: send text blocks.",
                code="unsupported_content",
            )
        text = block.string("text")
        if text is None:
            raise block.error("text", "is required: give a string.")
        self.cache_control(block)
        return text


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
            name = choice.required_string("name")
            if all(tool["function"]["name"] != name for tool in tools):
                raise choice.error("name", "is not among the tools: name one of them.")
            return {"type": "function", "function": {"name": name}}, single_call
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
