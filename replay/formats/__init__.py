"""Trace formats: a module each; a file is read by the first one that accepts its first document."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson

from replay.errors import TraceError
from replay.formats.base import Entry, TraceFormat
from replay.formats.claude_code import CLAUDE_CODE
from replay.formats.mooncake import MOONCAKE
from replay.formats.payload import INPUTS, PAYLOAD
from replay.formats.swe_agent import SWE_AGENT
from replay.formats.tracelab import TRACELAB
from replay.formats.weka import WEKA
from replay.trace import Session

FORMATS: tuple[TraceFormat, ...] = (WEKA, MOONCAKE, TRACELAB, SWE_AGENT, CLAUDE_CODE, INPUTS, PAYLOAD)
SUFFIXES = (".json", ".jsonl", ".traj")


def read_sessions(paths: Sequence[Path]) -> Iterator[Session]:
    """The sessions of files and folders (searched recursively, in the order of their names).

    Raises TraceError for what can't be read.
    """
    for path in paths:
        for file in _files(path):
            yield from _read_file(file, in_folder=path.is_dir())


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise TraceError(path, "", "the folder holds no .json, .jsonl or .traj file")
        return files
    if not path.exists():
        raise TraceError(path, "", "no such file or folder")
    return [path]


def _read_file(path: Path, *, in_folder: bool) -> Iterator[Session]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(path, "", f"can't be read ({error.strerror})") from error
    documents = _documents(path, data)
    first = next(documents, None)
    if first is None:
        return
    where, document = first
    for trace_format in FORMATS:
        if trace_format.accepts(document):
            entries = map(partial(_entry, path), itertools.chain([first], documents))
            yield from trace_format.read(entries, in_folder=in_folder)
            return
    names = ", ".join(trace_format.name for trace_format in FORMATS)
    raise TraceError(path, where, f"is in no format that replay reads ({names})")


def _documents(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    lines = enumerate(data.splitlines(), 1) if path.suffix == ".jsonl" else [(0, data)]
    for number, line in lines:
        where = f"line {number}" if number else ""
        if line.strip() or not number:
            try:
                yield where, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TraceError(path, where, f"is not JSON ({error})") from error


def _entry(path: Path, found: tuple[str, Any]) -> Entry:
    where, document = found
    if not isinstance(document, dict):
        raise TraceError(path, where, f"must be an object, is {type(document).__name__}")
    return Entry(path, where, cast("dict[str, Any]", document))
