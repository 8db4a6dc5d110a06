"""Build an untrained DSpark draft for a checkpoint.

It proposes noise: decoding with it is slower than without. It is for tests and measurements of verification.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from model.state import state_directory

EXAMPLES = """\
  longhaul draft build
  longhaul draft build --target /models/k3 --output /models/k3-draft --block-size 4
"""

_MAX_BLOCK = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `longhaul draft`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="write the draft", description="Write an untrained draft.")
    build.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="the checkpoint to draft for (default: models/k3-tiny of the state directory)",
    )
    build.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write it (default: models/k3-tiny-draft of the state directory)",
    )
    build.add_argument("--block-size", type=int, default=7, help="tokens a block (default: %(default)s)")
    build.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    build.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Build and report; 0 when the draft stands, 1 when it could not be written, 2 for bad arguments."""
    if not 1 <= args.block_size <= _MAX_BLOCK:
        print(
            f"longhaul draft build: --block-size {args.block_size}: give 1 to {_MAX_BLOCK}", file=sys.stderr
        )
        return 2
    from speculative import draft  # torch: not for `--help`

    models = state_directory() / "models"
    target: Path = args.target or models / "k3-tiny"
    path: Path = args.output or models / "k3-tiny-draft"
    try:
        config = draft.build(path, target, seed=args.seed, block_size=args.block_size)
    except (draft.DraftError, OSError) as error:
        print(f"longhaul draft build: {error}", file=sys.stderr)
        return 1
    summary = {"path": str(path), "target": str(target), "seed": args.seed, **asdict(config)}
    if args.json:
        print(json.dumps(summary))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in summary.items():
        table.add_row(name, str(value))
    Console().print(table)
    return 0
