"""OpenAI Chat Completions: requests in.

Source: https://platform.openai.com/docs/api-reference/chat, with the dialects of vLLM, SGLang and Kimi that
agents use. What a field may hold, and what is ignored, is in the README of this package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cache_store.retention import TtlClass
from service.conversation import Conversation
from service.fields import Fields
from service.images import image_part
from service.sampling import Sampling, read_sampling

EFFORTS: Final[Mapping[str, str]] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""K3 knows low, high and max; OpenAI's other words go to the nearest, upwards. `none` turns thinking off."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_SEEING_ROLES: Final = ("user", "tool")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to `/v1/chat/completions`. `model` None: whatever the engine serves."""

    model: str | None
    conversation: Conversation
    sampling: Sampling
    stream: bool
    include_usage: bool
    single_call: bool


def read_chat_request(fields: Fields, defaults: Mapping[str, float], vocabulary: int) -> ChatRequest:
    """Read the body of a request; `defaults` are for sampling. Raises InvalidRequest."""
    if (fields.integer("n", 1, 128) or 1) > 1:
        raise fields.error("n", "only 1 is supported: send the request again for another choice.")
    options = fields.nested("stream_options")
    for name in ("session_id", "prompt_cache_key"):  # read by service.identity, which takes what it finds
        fields.string(name)
    return ChatRequest(
        model=fields.string("model"),
        conversation=_conversation(fields),
        sampling=read_sampling(fields, defaults, vocabulary),
        stream=fields.boolean("stream") or False,
        include_usage=options is not None and options.boolean("include_usage") is True,
        single_call=fields.boolean("parallel_tool_calls") is False,
    )


def read_retention(fields: Fields) -> TtlClass | None:
    """OpenAI's `prompt_cache_retention` as a class of time to live; None for the service's own."""
    retention = fields.string("prompt_cache_retention", choices=("in_memory", "in-memory", "24h"))
    return "24h" if retention == "24h" else None


def _conversation(fields: Fields) -> Conversation:
    entries = fields.entries("messages")
    if not entries:
        raise fields.error("messages", "is required: give at least one message.")
    tools = tuple(_tool(entry) for entry in fields.entries("tools"))
    thinking, effort = _thinking(fields)
    return Conversation(
        messages=tuple(_message(entry) for entry in entries),
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=_tool_choice(fields, tools),
        response_format=_response_format(fields),
        partial=_partial(entries),
    )


def _partial(entries: list[Fields]) -> bool:
    """Kimi's `partial: true` on the last message, an assistant's: the model goes on with it."""
    for position, entry in enumerate(entries):
        if not entry.boolean("partial"):
            continue
        if position < len(entries) - 1 or entry.values.get("role") != "assistant":
            raise entry.error("partial", "may be true for the last message only, and for an assistant's.")
        return True
    return False


def _message(entry: Fields) -> dict[str, Any]:
    """The message with the fields that mean something to K3, and no others."""
    role = entry.required_string("role")
    if role not in _ROLES:
        raise entry.error("role", f"must be one of {', '.join(_ROLES)}.")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(entry),
    }
    if name := entry.string("name"):
        message["name"] = name
    if role == "assistant":
        if reasoning := entry.string("reasoning_content") or entry.string("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := [_tool_call(call) for call in entry.entries("tool_calls")]:
            message["tool_calls"] = calls
        if entry.values.get("function_call") is not None:
            raise entry.error("function_call", "is not supported: use tool_calls.")
    elif role == "tool":
        if (answered := entry.string("tool_call_id")) is not None:
            message["tool_call_id"] = answered
    elif message["role"] == "system" and (tools := [_tool(tool) for tool in entry.entries("tools")]):
        message["tools"] = tools
    return message


def _content(entry: Fields) -> str | list[dict[str, Any]] | None:
    content = entry.values.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise entry.error("content", "must be a string, an array of parts, or null.")
    sees = entry.values.get("role") in _SEEING_ROLES
    return [_part(part, sees=sees) for part in entry.entries("content")]


def _part(part: Fields, *, sees: bool) -> dict[str, Any]:
    kind = part.required_string("type")
    if kind == "image_url" and sees:
        image = part.nested("image_url")
        if image is None:
            raise part.error("image_url", "is required: give an object with url.")
        return image_part(image, "url", image.required_string("url"))
    name = "refusal" if kind == "refusal" else "text"
    if kind not in _TEXT_PARTS and kind != "refusal":
        raise part.error(
            "type",
            f"parts of type {kind[:40]!r} are not supported here: send text parts.",
            code="unsupported_content",
        )
    text = part.string(name)
    if text is None:
        raise part.error(name, "is required: give a string.")
    return {"type": "text", "text": text}


def _tool_call(call: Fields) -> dict[str, Any]:
    call.string("type", choices=("function",))
    function = call.nested("function")
    if function is None:
        raise call.error("function", "is required: give an object with name and arguments.")
    read: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": function.required_string("name"),
            "arguments": function.string("arguments") or "",
        },
    }
    if (id := call.string("id")) is not None:
        read["id"] = id
    return read


def _tool(tool: Fields) -> Mapping[str, Any]:
    """A tool as the client wrote it: the whole declaration stands in the prompt."""
    if tool.required_string("type") != "function":
        raise tool.error("type", "must be 'function': the other types of tools are not supported.")
    function = tool.nested("function")
    if function is None:
        raise tool.error("function", "is required: give an object with name and parameters.")
    function.required_string("name")
    function.string("description")
    function.nested("parameters")
    function.boolean("strict")
    return tool.values


def _tool_choice(fields: Fields, tools: tuple[Mapping[str, Any], ...]) -> str | Mapping[str, Any] | None:
    choice = fields.values.get("tool_choice")
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, str):
        if choice not in ("none", "required"):
            raise fields.error(
                "tool_choice", "must be auto, none, required, or an object that names a function."
            )
        if choice == "required" and not tools:
            raise fields.error("tool_choice", "needs tools: give at least one, or leave tool_choice out.")
        return choice if tools else None
    named = fields.nested("tool_choice")
    assert named is not None
    function = named.nested("function")
    if named.string("type") != "function" or function is None:
        raise fields.error("tool_choice", 'must look like {"type": "function", "function": {"name": "..."}}.')
    return named_tool(function, function.required_string("name"), tools)


def named_tool(fields: Fields, name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The choice of one tool, whose name `fields` gave, in the terms of Chat; raises for an unknown name."""
    if all(tool["function"]["name"] != name for tool in tools):
        raise fields.error("name", "is not among the tools: name one of them.")
    return {"type": "function", "function": {"name": name}}


def _response_format(fields: Fields) -> Mapping[str, Any] | None:
    response_format = fields.nested("response_format")
    if response_format is None:
        return None
    match response_format.string("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            outer = response_format.nested("json_schema")
            if outer is None or outer.nested("schema") is None:
                raise response_format.error(
                    "json_schema", "is required: give an object with name and schema."
                )
            return {"type": "json_schema", "json_schema": outer.values}
        case _:
            raise response_format.error("type", "must be one of text, json_object, json_schema.")


def _thinking(fields: Fields) -> tuple[bool, str | None]:
    """Whether to think, and how hard: by `reasoning_effort`, `thinking` (Kimi), `chat_template_kwargs`."""
    given = fields.string("reasoning_effort")
    if given is not None and given != "none" and given not in EFFORTS:
        raise fields.error("reasoning_effort", f"must be one of none, {', '.join(EFFORTS)}.")
    thinking = given != "none"
    if (switch := fields.nested("thinking")) is not None:
        thinking = thinking and switch.string("type", choices=("enabled", "disabled")) != "disabled"
    if (template := fields.nested("chat_template_kwargs")) is not None:
        thinking = thinking and template.boolean("thinking") is not False
    return thinking, EFFORTS[given] if thinking and given is not None else None
