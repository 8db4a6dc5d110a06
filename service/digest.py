"""The visible digest: what of a conversation every client sends back, as a chain of hashes.

`d(0)` covers the salt and the head (tools, thinking, effort), `d(n) = H(d(n-1), canonical(message n))`. Two
requests with equal digests show the same conversation, whatever their clients dropped, rewrote or re-ordered:

- role (`developer` is `system`), name, tools declared by a system message;
- text: parts joined, null, "" and [] equal, white space at the end cut; parts that are no text as sorted
  JSON, without cache hints;
- tool calls: names and arguments in order, without ids. Arguments are compared as JSON values (key order,
  white space and number formatting do not matter; empty is `{}`); text that is no JSON is compared as it is;
- tool results: the position of the call that they answer, whatever its id, in the order of the calls;
- not the reasoning: its digests are kept beside the chain, white space left out.

A digest is BLAKE2b (RFC 7693), 16 bytes; what is beside the chain is 8 bytes.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from service.conversation import Conversation, Message

DIGEST_BYTES: Final = 16
SHORT_BYTES: Final = 8
NO_REASONING: Final = bytes(SHORT_BYTES)
"""The reasoning digest of a message without reasoning."""

_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_CACHE_HINTS: Final = ("cache_control",)
_EXACT_FLOAT: Final = 2.0**53


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a message shows, aspect by aspect, so that two that differ can be told apart by what differs."""

    role: str
    content: bytes
    calls: bytes
    attributes: bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """The digests of a conversation: `digests[n]` covers the head and the first n messages.

    Tool results count in the order of their calls; `places` says where each message stands in the request.
    `reasoning` has a digest for every message, `NO_REASONING` for those that have none.
    """

    digests: tuple[bytes, ...]
    fingerprints: tuple[Fingerprint, ...]
    reasoning: tuple[bytes, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.digests) - 1 == len(self.fingerprints) == len(self.reasoning) == len(self.places)

    @property
    def head(self) -> bytes:
        """The digest of the head alone, shortened."""
        return self.digests[0][:SHORT_BYTES]


def chain(salt: bytes, conversation: Conversation, messages: Sequence[Message]) -> Chain:
    """Digest a conversation's head and the given messages of it."""
    effort = conversation.effort if conversation.thinking else None
    head = _hash(salt, _json([conversation.tools, conversation.thinking, effort]))
    digests, fingerprints = [head], list[Fingerprint]()
    ordered = list(_in_call_order(messages))
    for place, attributes in ordered:
        fingerprint = _fingerprint(messages[place], attributes)
        fingerprints.append(fingerprint)
        digests.append(extend(digests[-1], fingerprint))
    return Chain(
        digests=tuple(digests),
        fingerprints=tuple(fingerprints),
        reasoning=tuple(reasoning_digest(messages[place]) for place, _ in ordered),
        places=tuple(place for place, _ in ordered),
    )


def extend(digest: bytes, fingerprint: Fingerprint) -> bytes:
    """The digest after one more message."""
    return _hash(
        digest, fingerprint.role.encode(), fingerprint.content, fingerprint.calls, fingerprint.attributes
    )


def fingerprint(message: Message) -> Fingerprint:
    """The fingerprint of a message that is no tool result."""
    return _fingerprint(message, _attributes(message))


def reasoning_digest(message: Message) -> bytes:
    """Digest of an assistant message's reasoning, white space left out; `NO_REASONING` for none."""
    if message.get("role") != "assistant":
        return NO_REASONING
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str) or not (visible := "".join(reasoning.split())):
        return NO_REASONING
    return _short(visible)


def call_ids_digest(messages: Iterable[Message]) -> bytes:
    """Digest of the tool call ids in the last message that has calls. Ids are unguessable."""
    ids: list[Any] = []
    for message in messages:
        if calls := calls_of(message):
            ids = [call.get("id") for call in calls]
    return _short(_json(ids).decode("utf-8", "surrogatepass"))


def label_digest(label: str) -> bytes:
    """A short digest of any name, such as a session's."""
    return _short(label)


def _fingerprint(message: Message, attributes: object) -> Fingerprint:
    role = str(message.get("role"))
    return Fingerprint(
        role="system" if role == "developer" else role,
        content=_content_digest(_content(message.get("content"))),
        calls=_value_digest([_call(call) for call in calls_of(message)]),
        attributes=_value_digest(attributes),
    )


def _attributes(message: Message) -> object:
    tools = message.get("tools") if message.get("role") in ("system", "developer") else None
    return [message.get("name") or None, tools or None]


def _content(content: object) -> list[Any]:
    """Text, and parts that are no text, with adjoining text joined."""
    if isinstance(content, str):
        parts: list[Any] = [content]
    elif isinstance(content, Sequence):
        parts = [_part(part) for part in cast("Sequence[Any]", content)]
    else:
        parts = [] if content is None else [["unknown", content]]
    joined: list[Any] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    if joined and isinstance(joined[-1], str):
        joined[-1] = joined[-1].rstrip()
        if not joined[-1]:
            joined.pop()
    return joined


def _part(part: object) -> object:
    if not isinstance(part, Mapping):
        return ["unknown", part]
    fields = cast("Mapping[str, Any]", part)
    text = fields.get("text")
    if fields.get("type") in _TEXT_PARTS and isinstance(text, str):
        return text
    return ["part", {key: value for key, value in fields.items() if key not in _CACHE_HINTS}]


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """An assistant message's tool calls; what is no object is left out."""
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, Sequence) or isinstance(calls, str):
        return []
    return [call for call in cast("Sequence[Any]", calls) if isinstance(call, Mapping)]


def _call(call: Mapping[str, Any]) -> object:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return ["unknown", function]
    fields = cast("Mapping[str, Any]", function)
    return [fields.get("name"), *_arguments(fields.get("arguments"))]


def _arguments(arguments: object) -> tuple[str, object]:
    if isinstance(arguments, str):
        if not arguments.strip():
            return "json", {}
        try:
            return "json", _plain(json.loads(arguments))
        except (ValueError, RecursionError):
            return "text", arguments.rstrip()
    return "json", {} if arguments is None else _plain(arguments)


def _plain(value: object) -> object:
    """A JSON value with numbers as JavaScript prints them: 1.0 is 1, and -0.0 is 0."""
    match value:
        case float():
            if math.isfinite(value) and value.is_integer() and abs(value) < _EXACT_FLOAT:
                return int(value)
            return value
        case Mapping():
            return {key: _plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
        case list():
            return [_plain(item) for item in cast("list[Any]", value)]
        case _:
            return value


def _in_call_order(messages: Sequence[Message]) -> Iterator[tuple[int, object]]:
    """Each message's place and attributes, runs of tool results in the order of `model.encoding`."""
    names: list[str | None] = []
    positions: dict[str | None, int] = {}
    answered = 0
    start = 0
    while start < len(messages):
        message = messages[start]
        if message.get("role") != "tool":
            if message.get("role") == "assistant":
                calls = calls_of(message)
                names = [_tool_name(call) for call in calls]
                positions = {
                    str(call["id"]): position
                    for position, call in reversed(list(enumerate(calls, start=1)))
                    if call.get("id") is not None
                }
                answered = 0
            yield start, _attributes(message)
            start += 1
            continue
        end = start
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        run = [(positions.get(_answered_id(messages[place]), 0), place) for place in range(start, end)]
        known = all(position for position, _ in run)
        if known:
            run.sort(key=lambda item: item[0])
        for position, place in run:
            answered += 1
            if known:
                yield place, [names[position - 1], position]
            else:
                own = messages[place].get("tool", messages[place].get("name"))
                called = names[answered - 1] if answered <= len(names) else None
                yield place, [called if own is None else str(own), answered]
        start = end


def _tool_name(call: Mapping[str, Any]) -> str | None:
    function = call.get("function", call)
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _answered_id(result: Message) -> str | None:
    answered = result.get("tool_call_id", result.get("id"))
    return None if answered is None else str(answered)


def _content_digest(content: list[Any]) -> bytes:
    if all(isinstance(part, str) for part in content):  # one text at most; escaping it would take longest
        return _hash(b"text", "".join(content).encode("utf-8", "surrogatepass"))
    return _value_digest(content)


def _value_digest(value: object) -> bytes:
    if value == [] or value == [None, None]:
        return _NOTHING
    return _hash(b"JSON", _json(value))


def _size(size: int) -> bytes:
    return size.to_bytes(8, "little")


_SIZES: Final = tuple(map(_size, range(DIGEST_BYTES + 1)))


def _hash(*parts: bytes) -> bytes:
    sized: list[bytes] = []
    for part in parts:
        size = len(part)
        sized += (_SIZES[size] if size < len(_SIZES) else _size(size), part)
    return hashlib.blake2b(b"".join(sized), digest_size=DIGEST_BYTES).digest()


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=SHORT_BYTES).digest()


def _json(value: object) -> bytes:
    """Sorted, compact JSON. Raises `ValueError` for nesting that is too deep."""
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    except RecursionError as error:
        raise ValueError("messages: nested too deeply; flatten them") from error
    return text.encode("utf-8", "surrogatepass")


_NOTHING: Final = _hash(b"nothing")
