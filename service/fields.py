"""Reading a request's JSON: every complaint names the field by its path and says what would do.

A field that is null counts as absent, as in OpenAI's API. Fields that nobody reads are ignored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import orjson

from service.errors import InvalidRequest

MAX_DEPTH: Final = 128
"""How deep objects and arrays may be nested: schemas of real tools stay under 20."""


def parse_object(body: bytes) -> "Fields":
    """The JSON object of a request body. Raises InvalidRequest for anything else, and for deep nesting."""
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise InvalidRequest("The request body must be a JSON object.", code="invalid_json")
    values = cast(dict[str, Any], document)
    _check_depth(values)
    return Fields(values)


def _check_depth(document: dict[str, Any]) -> None:
    layer: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        layer = [
            child
            for node in layer
            for child in (cast(dict[str, Any], node).values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not layer:
            return
    raise InvalidRequest(
        f"The request body is nested more than {MAX_DEPTH} levels deep. Flatten it.", code="invalid_json"
    )


class Fields:
    """The fields of a JSON object; `path` is where the object stands in the request."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def path(self, name: str) -> str:
        """Where a field of this object stands in the request."""
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, remedy: str, *, code: str | None = None) -> InvalidRequest:
        """A complaint about one field; `remedy` goes on "PATH: "."""
        path = self.path(name)
        return InvalidRequest(f"{path}: {remedy}", param=path, code=code)

    def string(self, name: str, *, choices: Sequence[str] = ()) -> str | None:
        """A string, one of `choices` when there are any."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {_kind(value)}.")
        if choices and value not in choices:
            raise self.error(name, f"must be one of {', '.join(choices)}.")
        return value

    def required_string(self, name: str) -> str:
        """A string of at least one character."""
        value = self.string(name)
        if not value:
            raise self.error(name, "is required: give a string that is not empty.")
        return value

    def boolean(self, name: str) -> bool | None:
        """True or false."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.error(name, f"must be true or false, not {_kind(value)}.")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number within [low, high]; 3.0 counts as one."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be a whole number, not {_kind(value)}.")
        if not low <= value <= high:
            raise self.error(name, f"must be between {low} and {high}.")
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number within [low, high], or (low, high] with `above`."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {_kind(value)}.")
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise self.error(name, f"must be {'above' if above else 'at least'} {low} and at most {high}.")
        return float(value)

    def nested(self, name: str) -> "Fields | None":
        """An object."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {_kind(value)}.")
        return Fields(cast(dict[str, Any], value), self.path(name))

    def entries(self, name: str) -> list["Fields"]:
        """An array of objects; empty when absent."""
        return [self._entry(name, index, value) for index, value in self._array(name)]

    def strings(self, name: str) -> list[str]:
        """An array of strings; empty when absent."""
        for index, value in self._array(name):
            if not isinstance(value, str):
                raise self.error(f"{name}[{index}]", f"must be a string, not {_kind(value)}.")
        return cast(list[str], self.values.get(name) or [])

    def _array(self, name: str) -> Iterator[tuple[int, Any]]:
        value = self.values.get(name)
        if value is None:
            return iter(())
        if not isinstance(value, list):
            raise self.error(name, f"must be an array, not {_kind(value)}.")
        return enumerate(cast(list[Any], value))

    def _entry(self, name: str, index: int, value: object) -> "Fields":
        if not isinstance(value, dict):
            raise self.error(f"{name}[{index}]", f"must be an object, not {_kind(value)}.")
        return Fields(cast(dict[str, Any], value), self.path(f"{name}[{index}]"))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
