"""What `longhaul model pad` and `longhaul draft pad` have in common: options, errors, what is printed."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, source: str, default: str | None = None) -> None:
    """Declare the options: --SOURCE is what to pad, `default` what that is when it isn't given."""
    parser.add_argument(
        f"--{source}",
        dest="source",
        type=Path,
        metavar="DIR",
        required=default is None,
        help="what to pad" + (f" (default: {default})" if default else ""),
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to write the copy")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="a hidden size that is a multiple of the old one: larger, but nothing is rounded",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(name: str, args: argparse.Namespace, pad: Callable[..., dict[str, Any]]) -> int:
    """Pad `args.source` and say what was done, as the command `name`; 0, or 1 when it can't be done."""
    from model.padding import PaddingError  # torch: not for `--help`

    try:
        summary = pad(args.source, args.output, exact=args.exact)
    except (PaddingError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    if not summary["padded"]:
        print(f"{name}: {args.source} fits already: nothing was written", file=sys.stderr)
    if args.json:
        print(json.dumps(summary))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for field, value in summary.items():
        table.add_row(field, " -> ".join(map(str, value)) if isinstance(value, list) else str(value))
    Console().print(table)
    return 0
