"""What a trace format has to do, and how it reads fields so that errors name file, line and field."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from replay.errors import TraceError
from replay.trace import Session


@dataclass(frozen=True, slots=True)
class Entry:
    """One JSON object of a file and where it stands, such as `line 3` or `requests[2]`."""

    path: Path
    where: str
    values: dict[str, Any]

    def at(self, name: str) -> str:
        """Where a field of the object stands."""
        joint = " " if self.where.startswith("line ") and " " not in self.where[5:] else "."
        return f"{self.where}{joint}{name}" if self.where else name

    def error(self, name: str, problem: str) -> TraceError:
        """An error that names the field."""
        return TraceError(self.path, self.at(name), problem)

    def object(self, name: str) -> "Entry":
        """The object in a field."""
        return self._entry(self.at(name), self.values.get(name))

    def child(self, name: str, index: int, value: Any) -> "Entry":
        """The object at `index` of the list in a field."""
        return self._entry(self.at(f"{name}[{index}]"), value)

    def objects(self, name: str) -> list["Entry"]:
        """All objects of the list in a field."""
        return [self.child(name, index, value) for index, value in enumerate(self.list(name))]

    def _entry(self, where: str, value: Any) -> "Entry":
        if not isinstance(value, dict):
            raise TraceError(self.path, where, f"must be an object, is {type(value).__name__}")
        return Entry(self.path, where, cast("dict[str, Any]", value))

    def integer(self, name: str, *, default: int | None = None, least: int = 0) -> int:
        """An integer; `default` where the field is missing. Raises TraceError."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"must be an integer of at least {least}, is {value!r}")
        return value

    def integers(self, name: str) -> list[int]:
        """A list of integers, empty where the field is missing. Raises TraceError."""
        values = self.list(name) if name in self.values else []
        for number, value in enumerate(values):
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.error(f"{name}[{number}]", f"must be an integer, is {value!r}")
        return values

    def seconds(self, name: str, *, default: float | None = None) -> float:
        """A finite number; `default` where the field is missing or null. Raises TraceError."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(name, f"must be a number of seconds, is {value!r}")
        return float(value)

    def milliseconds(self, name: str, *, default: float | None = None) -> float:
        """A finite number of milliseconds, in seconds. Raises TraceError."""
        try:
            return self.seconds(name, default=default) / 1000
        except TraceError:
            raise self.error(
                name, f"must be a number of milliseconds, is {self.values.get(name)!r}"
            ) from None

    def text(self, name: str) -> str:
        """A string that is not empty. Raises TraceError."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, f"must be a text, is {value!r}")
        return value

    def list(self, name: str) -> list[Any]:
        """A list. Raises TraceError."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, is {type(value).__name__}")
        return cast("list[Any]", value)


class TraceFormat(Protocol):
    """Reads the JSON documents of one file: a `.json` file has one, a `.jsonl` file one a line."""

    name: str

    def accepts(self, document: Any) -> bool:
        """Whether a file whose first document this is looks like this format; cheap, never raises."""
        ...

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """The sessions of a file; `in_folder` when the file was found in a folder, not named.

        Raises TraceError naming the path, the entry and the field.
        """
        ...
