"""What a trace format has to do."""

from pathlib import Path
from typing import Any, Protocol

from replay.trace import Session


class TraceFormat(Protocol):
    """Reads one JSON document of one format."""

    name: str

    def accepts(self, document: Any) -> bool:
        """Whether the document looks like this format; cheap, never raises."""
        ...

    def read(self, document: Any, path: Path, where: str) -> Session:
        """The session in the document. Raises TraceError naming path, the entry below `where`, field."""
        ...
