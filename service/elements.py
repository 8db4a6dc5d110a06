"""K3's elements: what a tag is, and which elements may stand in which.

A message holds channels (`think`, `response`, `tools`), `tools` holds `call`, a call holds `argument` or
`json`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_CHANNELS: Final = ("response", "tools", "think")
_ATTRIBUTED: Final = ("call", "argument", "json", "message")
TAGS: Final = (*_CHANNELS, *_ATTRIBUTED)
_MAX_TAG_CHARS: Final = 4096
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Tag:
    """A tag whose `<|sep|>` has not come yet."""

    opens: bool
    text: str = ""

    @property
    def name(self) -> str:
        """The text up to the first white space."""
        return re.split(r"\s", self.text, maxsplit=1)[0]

    def is_complete(self) -> bool:
        """Whether `<|sep|>` may come."""
        return self.name in TAGS and self.is_possible()

    def is_possible(self) -> bool:
        """Whether more text can make it one of K3's tags."""
        if self.name == self.text:
            return any(tag.startswith(self.text) for tag in TAGS)
        return self.opens and self.name in _ATTRIBUTED and len(self.text) <= _MAX_TAG_CHARS

    def attributes(self) -> dict[str, str]:
        """The attributes, unescaped; what is no attribute is skipped."""
        return {
            key: value.replace("&quot;", '"').replace("&amp;", "&")
            for key, value in _ATTRIBUTE.findall(self.text)
        }

    def rest(self, name: str) -> str:
        """The text that completes the tag as `name`."""
        if len(self.text) <= len(name):
            return name[len(self.text) :]
        if self.text.count('"') % 2:
            return '"'
        return '""' if self.text.endswith("=") else '=""' if re.search(r"\s\w+$", self.text) else ""


def inside(elements: Sequence[str], name: str) -> int:
    """How many elements end with the innermost `name`, itself included."""
    return elements[::-1].index(name) + 1


def left_by(elements: Sequence[str], name: str) -> int | None:
    """How many elements end where `name` opens; None when `name` has no place here and counts as absent."""
    match name:
        case "argument" | "json":
            return inside(elements, "call") - 1 if "call" in elements else None
        case "call" if "tools" in elements:
            return inside(elements, "tools") - 1
        case "message":
            return len(elements)
        case _:
            return inside(elements, "message") - 1 if "message" in elements else len(elements)


def entered_by(elements: Sequence[str], name: str) -> list[str]:
    """What `name` opens, after `left_by`: a call brings its `tools` along, a channel its message."""
    entered = [name]
    if name == "call" and "tools" not in elements:
        entered = ["tools", *entered]
    if name != "message" and "message" not in elements:
        entered = ["message", *entered]
    return entered
