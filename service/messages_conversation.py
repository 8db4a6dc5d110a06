"""Anthropic Messages: tools, system prompt and messages in.

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
from typing import Any, Final, Literal

from service.fields import Fields
from service.images import image_part

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""How the first system block of Claude Code begins. It differs between releases and requests."""

Retention = Literal["5m", "1h"]
"""How long a client wants its prefix to be kept, by `cache_control.ttl`."""

_ROLES: Final = ("user", "assistant", "system")


class ConversationReader:
    """Reads one request's tools, then its messages in order: a tool result depends on what was before it.

    `turn_of` gives the key of the turn that a signature names, or None. What the request's `cache_control`s
    ask for is there at the end: `retention`, the longest that any stands for, and `ttl`, the longest in so
    many words.
    """

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
                parts.append(self._part(block))
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
        return {"role": "tool", "tool_call_id": id, "content": self._parts(block, results=True)}

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

    def _parts(self, entry: Fields, *, results: bool = False) -> str | list[dict[str, Any]]:
        content = entry.values.get("content")
        if content is None or isinstance(content, str):
            return content or ""
        parts: list[dict[str, Any]] = []
        for block in entry.entries("content"):
            if results and block.string("type") == "tool_reference":
                parts.append({"type": "text", "text": self._reference(block)})
            elif results:
                parts.append(self._part(block))
            else:
                parts.append({"type": "text", "text": self._text(block)})
        return parts

    def _part(self, block: Fields) -> dict[str, Any]:
        """A block that a user or a tool may send: text or an image."""
        if block.string("type") != "image":
            return {"type": "text", "text": self._text(block)}
        source = block.nested("source")
        if source is None:
            raise block.error("source", "is required: give an object of type base64.")
        kind = source.string("type", choices=("base64", "url"))
        self.cache_control(block)
        if kind == "url":
            return image_part(source, "url", source.required_string("url"))
        media_type = source.required_string("media_type")
        return image_part(source, "data", f"data:{media_type};base64,{source.required_string('data')}")

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
