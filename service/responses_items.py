"""Items of the Responses API: read from a request, and turned into the messages of a conversation.

An item is read into the form in which the API shows it (`input_items`), and it is kept in that form. What a
message of Chat Completions holds in one object are several items here; those of one assistant message are,
in their order: reasoning, message, function calls. They are put together again by these rules:

- a function call belongs to the assistant message before it;
- an assistant's `message` begins a new one where the one before has text or calls already;
- `reasoning` begins a new one where the one before has text or calls already;
- what follows an item of the same turn of ours, by the id that we gave it, belongs to that item's message.

Reasoning is what `encrypted_content` holds if we sealed it, else the text of `content`, else the `summary`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from service.conversation import Message
from service.errors import InvalidRequest
from service.fields import Fields
from service.images import image_part

Item = dict[str, Any]

_ROLES: Final = ("user", "assistant", "system", "developer")
_OURS: Final = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_.*)?")
_STATUSES: Final = ("in_progress", "completed", "incomplete")


def turn_of(id: object) -> str | None:
    """The key of the turn that an item or a response with this id belongs to, if the id is one of ours."""
    found = _OURS.fullmatch(id) if isinstance(id, str) else None
    return found[1] if found else None


def read_input(fields: Fields) -> list[Item]:
    """The items of `input`, with ids as far as the client gave any. Raises InvalidRequest."""
    given = fields.values.get("input")
    if isinstance(given, str):
        if not given:
            raise fields.error("input", "must not be empty: give a text or items.")
        return [_message_item("user", given)]
    if given is not None and not isinstance(given, list):
        raise fields.error("input", "must be a string or an array of items.")
    return [_item(entry) for entry in fields.entries("input")]


def _item(entry: Fields) -> Item:
    kind = entry.string("type") or ("message" if "role" in entry.values else None)
    if kind is None and "id" in entry.values:
        kind = "item_reference"  # the type may be left out (openai: ItemReference.type)
    match kind:
        case "message":
            item = _read_message(entry)
        case "reasoning":
            item = _read_reasoning(entry)
        case "function_call":
            item = {
                "type": "function_call",
                "call_id": entry.required_string("call_id"),
                "name": entry.required_string("name"),
                "arguments": entry.string("arguments") or "",
            }
            if namespace := entry.string("namespace"):
                item["namespace"] = namespace
        case "function_call_output":
            item = {
                "type": "function_call_output",
                "call_id": entry.required_string("call_id"),
                "output": _output(entry),
            }
        case "item_reference":
            return {"type": "item_reference", "id": entry.required_string("id")}
        case None:
            raise entry.error("type", "is required: give the item's type.")
        case _:
            raise entry.error(
                "type",
                f"items of type {kind[:40]!r} are not supported: send message, reasoning, function_call, "
                "function_call_output or item_reference.",
                code="unsupported_content",
            )
    if id := entry.string("id"):
        item["id"] = id
    item["status"] = entry.string("status", choices=_STATUSES) or "completed"
    return item


def _read_message(entry: Fields) -> Item:
    role = entry.required_string("role")
    if role not in _ROLES:
        raise entry.error("role", f"must be one of {', '.join(_ROLES)}.")
    content = entry.values.get("content")
    if isinstance(content, str):
        return _message_item(role, content)
    if not isinstance(content, list):
        raise entry.error("content", "must be a string or an array of parts.")
    kind = "output_text" if role == "assistant" else "input_text"
    read = _seen_part if role == "user" else _text_part
    parts = [read(part, kind) for part in entry.entries("content")]
    return {"type": "message", "role": role, "content": parts}


def _message_item(role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [_part(kind, text)], "status": "completed"}


def _part(kind: str, text: str) -> dict[str, Any]:
    annotated: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **annotated}


def _seen_part(part: Fields, kind: str) -> dict[str, Any]:
    """A text or an image."""
    if part.string("type") != "input_image":
        return _text_part(part, kind)
    if part.values.get("file_id") is not None:
        raise part.error("file_id", "is not supported: send image_url.", code="unsupported_content")
    url = part.required_string("image_url")
    image_part(part, "image_url", url)
    return {"type": "input_image", "image_url": url, "detail": part.string("detail") or "auto"}


def _text_part(part: Fields, kind: str) -> dict[str, Any]:
    given = part.required_string("type")
    name = "refusal" if given == "refusal" else "text"
    if given not in ("input_text", "output_text", "text", "refusal"):
        raise part.error(
            "type",
            f"parts of type {given[:40]!r} are not supported: send text parts.",
            code="unsupported_content",
        )
    text = part.string(name)
    if text is None:
        raise part.error(name, "is required: give a string.")
    return _part(kind, text)


def _read_reasoning(entry: Fields) -> Item:
    item: Item = {
        "type": "reasoning",
        "summary": [_reasoning_part(part, "summary_text") for part in entry.entries("summary")],
    }
    if content := [_reasoning_part(part, "reasoning_text") for part in entry.entries("content")]:
        item["content"] = content
    if sealed := entry.string("encrypted_content"):
        item["encrypted_content"] = sealed
    return item


def _reasoning_part(part: Fields, kind: str) -> dict[str, Any]:
    return {"type": kind, "text": part.string("text") or ""}


def _output(entry: Fields) -> str | list[dict[str, Any]]:
    output = entry.values.get("output")
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise entry.error("output", "must be a string or an array of parts.")
    return [_seen_part(part, "input_text") for part in entry.entries("output")]


def tool_name(name: str, namespace: str | None) -> str:
    """The name under which K3 knows a tool that stands in a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


@dataclass(slots=True)
class _Assistant:
    """An assistant message that is being put together."""

    place: str
    reasoning: list[str] = field(default_factory=list[str])
    text: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    turns: set[str] = field(default_factory=set[str])

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text) or None}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        if len(self.turns) == 1:
            # A hint among turns that show the same: the digest has to prove it.
            (message["turn"],) = self.turns
        return message


def messages_of(
    items: Sequence[tuple[Item, str]], unseal: Callable[[str], str | None]
) -> Iterator[tuple[Message, str]]:
    """The messages that items make, each with the place of its first item in the request.

    `items` are given with their places. `unseal` opens `encrypted_content`, or gives None.
    """
    open_message: _Assistant | None = None
    for item, place in items:
        if not _is_assistants(item):
            if open_message is not None:
                yield open_message.message(), open_message.place
                open_message = None
            yield _message(item), place
            continue
        if open_message is not None and not _continues(open_message, item):
            yield open_message.message(), open_message.place
            open_message = None
        open_message = open_message or _Assistant(place)
        _add(open_message, item, unseal)
    if open_message is not None:
        yield open_message.message(), open_message.place


def _is_assistants(item: Item) -> bool:
    return item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant"


def _continues(message: _Assistant, item: Item) -> bool:
    if item["type"] == "function_call" or turn_of(item.get("id")) in message.turns:
        return True
    return not message.text and not message.calls


def _add(message: _Assistant, item: Item, unseal: Callable[[str], str | None]) -> None:
    match item["type"]:
        case "reasoning":
            message.reasoning.append(_reasoning(item, unseal))
        case "function_call":
            name = tool_name(item["name"], item.get("namespace"))
            message.calls.append(
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": name, "arguments": item["arguments"]},
                }
            )
        case _:
            # An empty text counts: it is what an answer without words or calls has.
            message.text.append("".join(part["text"] for part in item["content"]))
    if (turn := turn_of(item.get("id"))) is not None:
        message.turns.add(turn)


def _reasoning(item: Item, unseal: Callable[[str], str | None]) -> str:
    if (sealed := item.get("encrypted_content")) and (text := unseal(sealed)) is not None:
        return text
    parts: Sequence[Mapping[str, Any]] = item.get("content") or item["summary"]
    return "".join(part["text"] for part in parts)


def _message(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else [_chat_part(part) for part in output]
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    role = "system" if item["role"] == "developer" else item["role"]
    parts = [_chat_part(part) for part in item["content"]]
    alone = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": role, "content": parts[0]["text"] if alone else parts}


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image", "image": part["image_url"]}
    return {"type": "text", "text": part["text"]}


def relocated(error: InvalidRequest, places: Sequence[str]) -> InvalidRequest:
    """An error about `messages[N]` as one about the item that the message was made of."""
    found = re.match(r"messages\[(\d+)\]", error.param or "")
    if found is None or int(found[1]) >= len(places):
        return error
    place = places[int(found[1])]
    return InvalidRequest(error.message.replace(found[0], place, 1), param=place, code=error.code)
