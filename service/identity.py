"""Which session a request belongs to, from what clients put into headers and bodies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Session:
    """A client's name for its session, and the header or field it came from."""

    id: str
    source: str


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Session | None:
    """The session that a request names, or None. Header names in `headers` are in lower case."""
    raise NotImplementedError
