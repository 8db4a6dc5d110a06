"""Trace formats: each a module with `FORMAT`; the first whose `accepts` says yes reads the file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from replay.errors import TraceError
from replay.formats.base import TraceFormat
from replay.formats.weka import WEKA
from replay.trace import Session

FORMATS: tuple[TraceFormat, ...] = (WEKA,)
SUFFIXES = (".json", ".jsonl")


def read_sessions(paths: Sequence[Path]) -> Iterator[Session]:
    """The sessions of files and folders (searched recursively, in the order of their names).

    Raises TraceError for what can't be read.
    """
    for path in paths:
        for file in _files(path):
            yield from _read_file(file)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise TraceError(path, "", "the folder holds no .json or .jsonl file")
        return files
    if not path.exists():
        raise TraceError(path, "", "no such file or folder")
    return [path]


def _read_file(path: Path) -> Iterator[Session]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, "", f"can't be read ({error.strerror})") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                yield _read_document(path, f"line {number}", line)
    else:
        yield _read_document(path, "", data)


def _read_document(path: Path, where: str, data: bytes) -> Session:
    try:
        document: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TraceError(path, where, f"is not JSON ({error})") from error
    for trace_format in FORMATS:
        if trace_format.accepts(document):
            return trace_format.read(document, path, where)
    names = ", ".join(trace_format.name for trace_format in FORMATS)
    raise TraceError(path, where, f"is in no format that replay reads ({names})")
