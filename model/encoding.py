"""How Kimi K3 writes a conversation: markup and text as separate segments.

K3 has no Jinja template. Its checkpoint renders messages into segments `(text, is_markup)`; each is tokenized
alone, and only a markup segment may become special tokens. So text that spells `<|open|>` stays text, and the
tokens of a message do not depend on its neighbours. That second property is what an exact turn stands on: the
segments of a conversation are those of its parts, in order::

    head_segments(tools) + messages_segments(messages) + tail_segments(tool_choice) + generation_segments()

and a caller that already holds the tokens up to an assistant message encodes the messages after it alone.

Messages are OpenAI chat messages (plain JSON objects): `role`, `content` (text, a list of parts, or null),
`reasoning_content` (or `reasoning`), `tool_calls`, `tool_call_id`, `name`; `developer` is read as `system`.

Rules, beside what the functions say:

- An attribute is four segments: ` key`, `="`, the value with `&` and `"` escaped, `"`. Empty text makes none.
- Tools, and the schema of a response format, are compact JSON with every object's keys sorted.
- The `think` channel stands in every assistant message while thinking is on, empty where there is no
  reasoning, and in none while it is off. So a conversation keeps one setting, or its prefix changes.
- Reasoning that is only white space counts as none; other reasoning is kept to the letter.
- Arguments are parsed and written one element a key: a string as it is, everything else as JSON with Python's
  default separators. So `{"a":1e2}` and `{"a": 100.0}` encode alike. Arguments that are no JSON at all stand
  in one `json` element; JSON that is no object is refused.
- A run of tool results is put into the order of the calls of the assistant message before it when every id in
  the run is known; otherwise it stays as it is. The index counts results from 1 after each assistant message:
  it is not the position of the call, so a missing result moves the later ones up.
- A system message that carries `tools` declares them and drops its content.
- `tool_choice` and `response_format` speak for one turn only: the next rendering no longer has them.

Source: the encoder published with the checkpoint (`moonshotai/Kimi-K3`, `encoding_k3.py`), whose segments for
31 conversations are in `tests/model/cases.json`. The cases do not show a run of results with unknown ids, a
result that names its own tool, or an assistant message while thinking is off; these follow what that file
does. This module is stricter in one respect: where the published encoder skips what it does not know (roles)
or fails midway, it raises `EncodingError`, so that nothing a client sent is silently lost.

Standard library only: a copy of this file travels inside the tiny checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeGuard

Segment: TypeAlias = tuple[str, bool]
"""Text, and whether it is markup (may become special tokens)."""

OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
END_OF_MESSAGE: Final = "<|end_of_msg|>"
IMAGE_PLACEHOLDER: Final = "<|kimi_image_placeholder|>"
"""Where an image goes: spelled in text, or standing for an image part that has no prompt yet."""

THINKING_EFFORTS: Final = ("low", "high", "max")
"""What the encoder takes. The text shown to the model also names `medium`, which it refuses."""

_TOOLS_INTRO: Final = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS_INTRO: Final = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT_BODY: Final = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICE_BODY: Final = (
    "The system is invoked with `tool_choice={choice}`.\nYou {rule} in the next message."
)
_TOOL_CHOICE_RULES: Final = {"required": "MUST call tools", "none": "MUST NOT call any tools"}
_RESPONSE_FORMAT_BODY: Final = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA_BODY: Final = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_IMAGE_PARTS: Final = ("image", "image_url")


class EncodingError(ValueError):
    """A conversation that K3 cannot represent. `field` is its path, such as `messages[2].content[0].type`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def conversation_segments(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: object = None,
    response_format: Mapping[str, Any] | None = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Render a whole conversation, up to the point where the model continues.

    `image_prompts` holds, for every image in order, the markup that stands for it; without it images stay
    `IMAGE_PLACEHOLDER`. Raises `EncodingError`.
    """
    return [
        *head_segments(tools, thinking=thinking, thinking_effort=thinking_effort),
        *messages_segments(messages, thinking=thinking, image_prompts=image_prompts),
        *tail_segments(tool_choice, response_format),
        *(generation_segments(thinking) if add_generation_prompt else ()),
    ]


def head_segments(
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
) -> list[Segment]:
    """Render what stands before the first message: the tools, then the effort (only while thinking).

    Raises `EncodingError` for an effort outside `THINKING_EFFORTS`.
    """
    segments: list[Segment] = []
    if tools:
        segments += _tool_declaration(tools, _TOOLS_INTRO, "tools")
    if thinking and thinking_effort is not None:
        if thinking_effort not in THINKING_EFFORTS:
            raise EncodingError(
                "thinking_effort",
                f"{thinking_effort!r} is not supported; use {', '.join(THINKING_EFFORTS)}, or leave it out",
            )
        segments += _system_message("thinking-effort", _EFFORT_BODY.format(effort=thinking_effort))
    return segments


def messages_segments(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = True,
    calls: Sequence[Mapping[str, Any]] = (),
    image_prompts: Sequence[str] | None = None,
) -> list[Segment]:
    """Render consecutive messages, each run of tool results in the order of its calls.

    `calls` are the `tool_calls` of the assistant message just before `messages`, when these continue a
    conversation; `image_prompts` are those of the images in these messages. Raises `EncodingError`.
    """
    images = None if image_prompts is None else iter(image_prompts)
    segments: list[Segment] = []
    answered = 0
    for position, message in _in_call_order(messages, calls):
        field = f"messages[{position}]"
        role = message.get("role")
        if role == "assistant":
            calls, answered = _tool_calls(message, field), 0
        elif role == "tool":
            answered += 1
        segments += message_segments(
            message, thinking=thinking, calls=calls, index=answered, images=images, field=field
        )
    if images is not None and (left := len(list(images))):
        raise EncodingError("image_prompts", f"{left} more than the messages have images; give one an image")
    return segments


def message_segments(
    message: Mapping[str, Any],
    *,
    thinking: bool = True,
    calls: Sequence[Mapping[str, Any]] = (),
    index: int = 1,
    images: Iterator[str] | None = None,
    field: str = "message",
) -> list[Segment]:
    """Render one message.

    For a tool result, `index` is its number among the results since the last assistant message (from 1) and
    `calls` that message's `tool_calls`, which name the tool when the result does not. `images` yields the
    prompts of the images in order; `field` is the message's path for `EncodingError`.
    """
    match message.get("role"):
        case "assistant":
            attributes = [("role", "assistant"), *_name_attribute(message)]
            body = _assistant_body(message, thinking, images, field)
        case "user":
            attributes = [("role", "user"), *_name_attribute(message)]
            body = _content(message.get("content"), images, field)
        case "system" | "developer":
            if tools := message.get("tools"):
                return _tool_declaration(tools, _MORE_TOOLS_INTRO, f"{field}.tools")
            attributes = [("role", "system"), *_name_attribute(message)]
            body = _content(message.get("content"), images, field)
        case "tool":
            tool = _answered_tool(message, calls, index, field)
            attributes = [("role", "tool"), ("tool", tool), ("index", str(index))]
            body = _content(message.get("content"), images, field)
        case role:
            raise EncodingError(
                f"{field}.role", f"{role!r} is unknown; use system, developer, user, assistant or tool"
            )
    return [*_open("message", *attributes), *body, *_close("message"), (END_OF_MESSAGE, True)]


def tail_segments(
    tool_choice: object = None, response_format: Mapping[str, Any] | None = None
) -> list[Segment]:
    """Render what holds for the next message only: tool choice, then response format.

    `tool_choice` speaks when it is `"required"` or `"none"`; all else (`"auto"`, a named tool) is silent.
    SGLang passes it on only when the request has tools, so a caller that wants the same prompt does likewise.
    Raises `EncodingError` for a `json_schema` format without a schema and for an unknown format.
    """
    segments: list[Segment] = []
    if isinstance(tool_choice, str) and (rule := _TOOL_CHOICE_RULES.get(tool_choice)):
        body = _TOOL_CHOICE_BODY.format(choice=tool_choice, rule=rule)
        segments += _system_message("tool-choice", body)
    if response_format is None:
        return segments
    match response_format.get("type"):
        case None | "text":
            pass
        case "json_object":
            segments += _system_message("response-format", _RESPONSE_FORMAT_BODY.format(kind="json_object"))
        case "json_schema":
            body = _RESPONSE_FORMAT_BODY.format(kind="json_schema")
            body += _SCHEMA_BODY.format(
                schema=_sorted_json(_response_schema(response_format), "response_format")
            )
            segments += _system_message("response-format", body)
        case kind:
            raise EncodingError(
                "response_format.type", f"{kind!r} is unknown; use text, json_object or json_schema"
            )
    return segments


def generation_segments(thinking: bool = True) -> list[Segment]:
    """Render the opening of the message that the model writes, up to its first channel."""
    return [*_open("message", ("role", "assistant")), *_open("think" if thinking else "response")]


def _text(text: str) -> list[Segment]:
    return [(text, False)] if text else []


def _open(tag: str, *attributes: tuple[str, str]) -> list[Segment]:
    segments: list[Segment] = [(OPEN, True), (tag, False)]
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        segments += [(f" {key}", False), ('="', False), *_text(escaped), ('"', False)]
    return [*segments, (SEP, True)]


def _close(tag: str) -> list[Segment]:
    return [(CLOSE, True), (tag, False), (SEP, True)]


def _system_message(kind: str, body: str) -> list[Segment]:
    opening = _open("message", ("role", "system"), ("type", kind))
    return [*opening, *_text(body), *_close("message"), (END_OF_MESSAGE, True)]


def _tool_declaration(tools: object, intro: str, field: str) -> list[Segment]:
    if not _is_sequence(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise EncodingError(
            field, "must be a list of objects, such as {'type': 'function', 'function': {...}}"
        )
    return _system_message("tool-declare", f"{intro}```json\n{_sorted_json(tools, field)}\n```")


def _name_attribute(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    name = message.get("name")
    return [("name", str(name))] if name else []


def _content(content: object, images: Iterator[str] | None, field: str) -> list[Segment]:
    field = f"{field}.content"
    if content is None:
        return []
    if isinstance(content, str):
        return _text_with_images(content, images, field)
    if not _is_sequence(content):
        raise EncodingError(field, f"must be text, a list of parts or null, not {type(content).__name__}")
    segments: list[Segment] = []
    for position, part in enumerate(content):
        where = f"{field}[{position}]"
        if not _is_object(part):
            raise EncodingError(where, "must be an object, such as {'type': 'text', 'text': '...'}")
        kind = part.get("type")
        if kind in _IMAGE_PARTS:
            segments.append(_image(images, where))
        elif kind in _TEXT_PARTS:
            segments += _text_with_images(_string(part.get("text"), f"{where}.text"), images, where)
        else:
            known = ", ".join((*_TEXT_PARTS, *_IMAGE_PARTS))
            raise EncodingError(f"{where}.type", f"{kind!r} is not supported; use one of {known}")
    return segments


def _text_with_images(text: str, images: Iterator[str] | None, field: str) -> list[Segment]:
    if images is None:
        return _text(text)
    first, *rest = text.split(IMAGE_PLACEHOLDER)
    segments = _text(first)
    for piece in rest:
        segments += [_image(images, field), *_text(piece)]
    return segments


def _image(images: Iterator[str] | None, field: str) -> Segment:
    if images is None:
        return IMAGE_PLACEHOLDER, True
    prompt = next(images, None)
    if not prompt:
        raise EncodingError(field, "has an image without a prompt; give one image prompt for every image")
    return prompt, True


def _assistant_body(
    message: Mapping[str, Any], thinking: bool, images: Iterator[str] | None, field: str
) -> list[Segment]:
    segments: list[Segment] = []
    if thinking:
        reasoning = _string(
            message.get("reasoning_content") or message.get("reasoning") or "", f"{field}.reasoning_content"
        )
        segments += _open("think")
        if reasoning.strip():
            segments += _text_with_images(reasoning, images, f"{field}.reasoning_content")
        segments += _close("think")
    segments += [*_open("response"), *_content(message.get("content"), images, field), *_close("response")]
    if calls := _tool_calls(message, field):
        segments += _open("tools")
        for index, call in enumerate(calls, start=1):
            segments += _call(call, index, images, f"{field}.tool_calls[{index - 1}]")
        segments += _close("tools")
    return segments


def _tool_calls(message: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    if not _is_sequence(calls):
        raise EncodingError(f"{field}.tool_calls", f"must be a list, not {type(calls).__name__}")
    checked: list[Mapping[str, Any]] = []
    for position, call in enumerate(calls):
        if not _is_object(call):
            raise EncodingError(f"{field}.tool_calls[{position}]", "must be an object with a function")
        checked.append(call)
    return checked


def _function(call: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not _is_object(function):
        raise EncodingError(f"{field}.function", "must be an object with a name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise EncodingError(f"{field}.function.name", "must be the name of the tool")
    return function


def _call(call: Mapping[str, Any], index: int, images: Iterator[str] | None, field: str) -> list[Segment]:
    function = _function(call, field)
    segments = _open("call", ("tool", function["name"]), ("index", str(index)))
    field = f"{field}.function.arguments"
    arguments = _arguments(function.get("arguments"), field)
    if isinstance(arguments, str):
        content = _text_with_images(arguments, images, field)
        segments += [*_open("json", ("type", "object")), *content, *_close("json")]
    else:
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value, field)
            segments += _open("argument", ("key", key), ("type", _argument_type(value)))
            segments += [*_text_with_images(text, images, field), *_close("argument")]
    return [*segments, *_close("call")]


def _arguments(arguments: object, field: str) -> Mapping[str, Any] | str:
    """Arguments by key, or the text itself where it is no JSON."""
    if arguments is None or _is_object(arguments):
        return arguments or {}
    if not isinstance(arguments, str):
        raise EncodingError(field, f"must be JSON text or an object, not {type(arguments).__name__}")
    if not arguments.strip():
        return {}
    try:
        parsed: object = json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
    except RecursionError as error:
        raise EncodingError(field, "is nested too deeply; flatten it") from error
    except ValueError as error:  # an integer beyond the interpreter's digit limit
        raise EncodingError(field, f"cannot be read: {error}; send such a number as a string") from error
    if not _is_object(parsed):
        raise EncodingError(field, f"is JSON but no object: {arguments[:40]!r}; wrap it in an object")
    return parsed


def _argument_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _in_call_order(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each message with its position, runs of tool results in the order of their calls.

    The call that a result answers also names its tool: a stale `tool` or `name` is overridden.
    """
    tools = _tools_by_id(calls, "calls")
    start = 0
    while start < len(messages):
        message = messages[start]
        if not _is_object(message):
            raise EncodingError(f"messages[{start}]", "must be an object with a role")
        if message.get("role") != "tool":
            if message.get("role") == "assistant":
                field = f"messages[{start}]"
                tools = _tools_by_id(_tool_calls(message, field), f"{field}.tool_calls")
            yield start, message
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        run = [(position, messages[position]) for position in range(start, end)]
        answered = [tools.get(_answered_id(result)) for _, result in run]
        if None not in answered:
            ordered = sorted(zip(answered, run, strict=True), key=lambda item: item[0] or (0, ""))
            run = [(position, {**result, "tool": call[1]}) for call, (position, result) in ordered if call]
        yield from run
        start = end


def _tools_by_id(calls: Sequence[Mapping[str, Any]], field: str) -> dict[str | None, tuple[int, str]]:
    """Id of a call -> its position (from 1) and tool; the first of two equal ids counts."""
    tools: dict[str | None, tuple[int, str]] = {}
    for position, call in enumerate(calls, start=1):
        if call.get("id") is not None:
            name = _function(call, f"{field}[{position - 1}]")["name"]
            tools.setdefault(str(call["id"]), (position, name))
    return tools


def _answered_id(result: Mapping[str, Any]) -> str | None:
    answered = result.get("tool_call_id", result.get("id"))
    return None if answered is None else str(answered)


def _answered_tool(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], index: int, field: str
) -> str:
    tool = message.get("tool", message.get("name"))
    if tool is None and 0 < index <= len(calls):
        tool = _function(calls[index - 1], f"{field}: call {index}")["name"]
    if tool is None:
        raise EncodingError(
            field,
            "is a tool result that answers no call; give it the `name` of its tool, or put the assistant "
            "message with the matching `tool_calls` before it",
        )
    return str(tool)


def _response_schema(response_format: Mapping[str, Any]) -> object:
    outer = response_format.get("json_schema")
    if not _is_object(outer):
        raise EncodingError("response_format.json_schema", "is missing; give an object with a `schema`")
    return outer.get("schema", outer.get("json_schema", outer))


def _json(value: object, field: str, *, compact: bool = False, sort_keys: bool = False) -> str:
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=sort_keys)
    except RecursionError as error:
        raise EncodingError(field, "is nested too deeply; flatten it") from error
    except (TypeError, ValueError) as error:
        raise EncodingError(field, f"is no JSON value: {error}") from error


def _sorted_json(value: object, field: str) -> str:
    return _json(value, field, compact=True, sort_keys=True)


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise EncodingError(field, f"must be text, not {type(value).__name__}")
    return value


def _is_object(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
