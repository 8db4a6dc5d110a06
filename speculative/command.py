"""DSpark drafts: train one for the small K3, or build an untrained one for any checkpoint.

An untrained draft proposes noise: decoding with it is slower than without. It is for tests of verification.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from model.state import state_directory

EXAMPLES = """\
  longhaul draft build
  longhaul draft build --target /models/k3 --output /models/k3-draft --block-size 4
  longhaul draft train --output runs/k3-small-draft
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

    train = actions.add_parser(
        "train",
        help="train a draft of the small K3",
        description="Train a draft on what its target writes. A run goes on from the state it left.",
    )
    train.add_argument("--output", type=Path, required=True, metavar="DIR", help="draft, log and state")
    train.add_argument(
        "--target", type=Path, metavar="DIR", help="a K3 of `longhaul model train` (default: the shipped one)"
    )
    train.add_argument(
        "--minutes", type=float, default=8.0, help="of the run, rollouts included (default: %(default)s)"
    )
    train.add_argument(
        "--rollout-minutes", type=float, default=2.0, help="of rollouts (default: %(default)s)"
    )
    train.add_argument("--steps", type=int, help="train for so many batches instead")
    train.add_argument("--tokens", type=int, default=65536, help="a batch (default: %(default)s)")
    train.add_argument("--longest", type=int, default=32768, help="tokens of a text (default: %(default)s)")
    train.add_argument(
        "--rolled", type=int, default=1024, help="last tokens of a text, rolled out (default: %(default)s)"
    )
    train.add_argument(
        "--round", type=int, default=2 << 20, help="tokens rolled out at once (default: %(default)s)"
    )
    train.add_argument(
        "--anchors", type=int, default=64, help="blocks for 1,024 tokens (default: %(default)s)"
    )
    train.add_argument("--rate", type=float, default=1e-3, help="of learning (default: %(default)s)")
    train.add_argument(
        "--temperature", type=float, default=1.0, help="at which it will serve (default: %(default)s)"
    )
    train.add_argument("--weights", type=Path, metavar="DIR", help="begin with this draft's weights")
    train.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    train.add_argument(
        "--workers", type=int, help="processes that play users and tools (default: cores but two)"
    )
    train.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    train.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Do as asked; 0 when the draft stands, 1 when it could not be written, 2 for bad arguments."""
    return _train(args) if args.action == "train" else _build(args)


def _train(args: argparse.Namespace) -> int:
    import torch

    from model import small
    from model.training.command import Progress, note
    from speculative.draft import DraftError
    from speculative.training import SHARES, Plan, Run

    device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if min(args.anchors, args.rolled, args.round) < 1 or (args.steps is not None and args.steps < 1):
        print(
            "longhaul draft train: --steps, --anchors, --rolled and --round must be positive", file=sys.stderr
        )
        return 2
    if min(args.rate, args.temperature, args.minutes) <= 0:
        print("longhaul draft train: --rate, --temperature and --minutes must be positive", file=sys.stderr)
        return 2
    shares = {length: share for length, share in SHARES.items() if length <= args.longest}
    if not shares or args.tokens % max(shares):
        print(
            f"longhaul draft train: --longest {args.longest}: give one of {', '.join(map(str, SHARES))}, "
            "and --tokens a multiple of it",
            file=sys.stderr,
        )
        return 2
    plan = Plan(
        target=args.target or small.SHIPPED,
        output=args.output,
        minutes=args.minutes,
        rollout_minutes=args.rollout_minutes,
        steps=args.steps,
        tokens=args.tokens,
        shares=shares,
        rolled=args.rolled,
        round_tokens=args.round,
        anchors=args.anchors,
        rate=args.rate,
        temperature=args.temperature,
        weights=args.weights,
        seed=args.seed,
        workers=args.workers or max(1, (os.cpu_count() or 4) - 2),
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
    )
    torch.set_float32_matmul_precision("high")
    try:
        with Progress() as report:
            result = Run(plan, note).train(report)
    except (DraftError, OSError, FloatingPointError, KeyError) as error:
        print(f"longhaul draft train: {error}", file=sys.stderr)
        return 1
    result["path"] = str(plan.output)
    if args.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console

    Console().print_json(data=result)
    return 0


def _build(args: argparse.Namespace) -> int:
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
