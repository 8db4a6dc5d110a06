"""A tool call's arguments, from K3's typed elements to JSON text, piece by piece.

K3 writes one `argument` element a key; its type says how the body is meant. A string's body is raw text and
is escaped as it comes; an object's or array's is JSON and passed on as it comes; any other is short, so it is
held until it is complete and becomes a string where it is no JSON. A `json` element's body is all of the
arguments as they are. The JSON text has Python's default separators, as `model.encoding` writes values.

Objects and arrays are not checked, so a model that writes a broken one makes arguments that do not parse,
which the OpenAI API allows for.
"""

import json
from typing import Final, Literal

_STREAMED_TYPES: Final = ("object", "array")

Value = Literal["string", "streamed", "held", "json", "ignored"]


class CallArguments:
    """Joins the elements of one call into JSON text. Every method returns the text that it adds."""

    def __init__(self) -> None:
        self._value: Value | None = None
        self._held = ""
        self._form: Literal["empty", "object", "json"] = "empty"
        self._blank = True

    def open_argument(self, key: str, kind: str) -> str:
        """Begin the value of a key. Arguments after a `json` element are ignored."""
        if self._form == "json":
            self._value = "ignored"
            return ""
        start = ", " if self._form == "object" else "{"
        self._form = "object"
        self._held, self._blank = "", True
        if kind == "string":
            self._value = "string"
        else:
            self._value = "streamed" if kind in _STREAMED_TYPES else "held"
        return f"{start}{_quoted(key)}: " + ('"' if self._value == "string" else "")

    def open_json(self) -> str:
        """Begin the arguments as one piece of text; ignored after anything else."""
        self._value = "json" if self._form == "empty" else "ignored"
        if self._value == "json":
            self._form = "json"
        return ""

    def feed(self, text: str) -> str:
        """More of the open value."""
        match self._value:
            case "string":
                return _quoted(text)[1:-1]
            case "streamed":
                self._blank = self._blank and not text.strip()
                return text
            case "json":
                return text
            case "held":
                self._held += text
                return ""
            case _:
                return ""

    def close_value(self) -> str:
        """End the open value."""
        value, self._value = self._value, None
        match value:
            case "string":
                return '"'
            case "held":
                return self._held if _is_json(self._held) else _quoted(self._held)
            case "streamed" if self._blank:
                return '""'
            case _:
                return ""

    def close(self) -> str:
        """End the arguments; no value is open."""
        return {"empty": "{}", "object": "}", "json": ""}[self._form]

    def cut(self) -> str:
        """What was held back when the model was stopped within a value."""
        held, self._held = self._held, ""
        return held if self._value == "held" else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
