"""Two Kimi K3 for a machine without GPUs, both with every mechanism of the released model.

The tiny one (`build`) has 5 million random parameters and answers in gibberish: tests and measurements of
everything but the language run on it. The same seed gives the same bytes on every machine. The small one
has 17 million and is trained (`train`, `pack`) to call tools; `eval` plays held-out episodes with it, `pad`
makes of it one whose sizes SGLang's GPU kernels take.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from model import padding_command

EXAMPLES = """\
  longhaul model build
  longhaul model build --output /tmp/k3 --seed 7 --json
  longhaul model build --small --output /models/k3-small
  longhaul model train --output runs/k3-small --minutes 13
  longhaul model eval --json
  longhaul model pad --model /models/k3-small --output /models/k3-small-padded
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `longhaul model`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="write the checkpoint", description="Write the checkpoint.")
    build.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write it (default: models/k3-tiny or k3-small in $LONGHAUL_STATE or ./.state)",
    )
    build.add_argument("--small", action="store_true", help="the trained one instead of the random tiny one")
    build.add_argument("--seed", type=int, help="of the tiny one's weights (default: 0)")
    build.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    from model.evaluation import command as evaluation
    from model.training import command as training

    training.add_arguments(actions)
    evaluation.add_arguments(actions)
    pad = actions.add_parser(
        "pad",
        help="pad a K3 for a GPU",
        description="Write a copy that computes the same, in sizes that SGLang's GPU kernels take: a hidden "
        "size in multiples of 1024, a KV latent of 256 or 512. Its draft: longhaul draft pad.",
    )
    padding_command.add_arguments(pad, "model", "the small K3 that is shipped")


def run(args: argparse.Namespace) -> int:
    """Do as asked; 0 when it succeeded, 1 when it failed, 2 for bad arguments."""
    if args.action in ("train", "pack"):
        from model.training import command as training

        return training.run(args) if args.action == "train" else training.run_pack(args)
    if args.action == "eval":
        from model.evaluation import command as evaluation

        return evaluation.run(args)
    if args.action == "pad":
        return _pad(args)
    if args.small and args.seed is not None:
        print("longhaul model build: --seed is of the tiny one: leave it out with --small", file=sys.stderr)
        return 2
    from model.tiny import CheckpointError  # torch: not for `--help`

    try:
        summary = _write_small(args.output) if args.small else _write_tiny(args.output, args.seed or 0)
    except (CheckpointError, OSError) as error:
        print(f"longhaul model build: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(summary))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in summary.items():
        table.add_row(name, f"{value:,}" if name in ("parameters", "bytes") else str(value))
    Console().print(table)
    return 0


def _pad(args: argparse.Namespace) -> int:
    from model import padding, small

    args.source = args.source or small.build(small.default_path())
    return padding_command.run("longhaul model pad", args, padding.pad)


def _write_small(output: Path | None) -> dict[str, Any]:
    from model import small

    path = small.build(output or small.default_path())
    shipped = json.loads((small.SHIPPED / "longhaul.json").read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"path": str(path), "parameters": shipped["parameters"], "bytes": size}


def _write_tiny(output: Path | None, seed: int) -> dict[str, Any]:
    from model import tiny

    checkpoint = tiny.build(output or tiny.default_path(), seed)
    return {
        "path": str(checkpoint.path),
        "seed": checkpoint.seed,
        "parameters": checkpoint.parameters,
        "bytes": sum((checkpoint.path / name).stat().st_size for name in checkpoint.files),
        "sha256": checkpoint.files["model.safetensors"],
    }
