"""Two runs beside each other."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from replay.errors import ReplayError
from replay.html import Run, figures, page

NAME = "compare"
EXIT_UNUSABLE = 2


def run(paths: Sequence[Path], html: Path | None, *, as_json: bool) -> int:
    """Compare the two runs in the files; 0, or 2 when they can't be read."""
    try:
        if len(paths) != 2:
            raise ReplayError(f"compare: needs two files that --output has written, not {len(paths)}")
        runs = [(path.stem, _read(path)) for path in paths]
        if runs[0][0] == runs[1][0]:
            runs = [(str(path), read) for path, (_, read) in zip(paths, runs, strict=True)]
        found = [(name, figures(read)) for name, read in runs]
        if html is not None:
            html.write_text(page(runs), encoding="utf-8")
    except (ReplayError, OSError) as error:
        print(f"longhaul replay: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if as_json:
        (left, a), (right, b) = found
        rows = {name: {left: a[name], right: b[name]} for name in a}
        sys.stdout.write(orjson.dumps({"runs": [left, right], "figures": rows}).decode() + "\n")
    else:
        Console().print(_table(found))
    return 0


def _read(path: Path) -> Run:
    try:
        read: Any = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ReplayError(f"{path}: is not JSON ({error})") from error
    if not isinstance(read, dict):
        raise ReplayError(f"{path}: must be an object as --output writes it")
    document = cast("dict[str, Any]", read)
    for name in ("requests", "total"):
        if name not in document:
            raise ReplayError(f"{path}: has no {name!r}; write it with longhaul replay --output")
    return document


def _table(found: Sequence[tuple[str, dict[str, float | None]]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("")
    for name, _ in found:
        made.add_column(name, justify="right")
    for name in found[0][1]:
        values = [column[name] for _, column in found]
        made.add_row(name, *("-" if value is None else f"{value:,.4g}" for value in values))
    return made
