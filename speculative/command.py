"""DSpark drafts: train, evaluate, calibrate one of the small K3; build an untrained one for any checkpoint.

An untrained draft proposes noise: decoding with it is slower than without. It is for tests of verification.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from model import padding_command
from model.state import state_directory

EXAMPLES = """\
  longhaul draft build
  longhaul draft build --target /models/k3 --output /models/k3-draft --block-size 4
  longhaul draft train --output runs/k3-small-draft
  longhaul draft train --dry-run --target /models/Kimi-K3 --tokens 131072 --gpus 8
  longhaul draft eval --json
  longhaul draft calibrate --output runs/calibration
  longhaul draft pad --output /models/k3-small-draft-padded
"""

_MAX_BLOCK = 64
_Result = TypeVar("_Result")


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

    evaluate = actions.add_parser(
        "eval",
        help="measure accept lengths",
        description="Play held-out sessions on an engine with the draft, on the CPU, and measure what is "
        "accepted: as served, and as the trainer's own walk over the same text has it.",
    )
    _add_pair(evaluate)
    evaluate.add_argument("--output", type=Path, metavar="DIR", help="write figures and a plot there")
    evaluate.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    evaluate.add_argument("--quick", action="store_true", help="the shortest context alone, two sessions")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    calibrate = actions.add_parser(
        "calibrate",
        help="calibrate the confidence head and measure the machine",
        description="Write what SGLang's scheduler of verified tokens reads: temperatures of the confidence "
        "head (sts.json), steps a second by verified tokens (sps.json), and a plot (reliability.svg).",
    )
    _add_pair(calibrate)
    calibrate.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to write them")
    calibrate.add_argument("--seed", type=int, default=0, help="of the sessions (default: %(default)s)")
    calibrate.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    train = actions.add_parser(
        "train",
        help="train a draft of the small K3",
        description="Train a draft on what its target writes. A run goes on from the state it left.",
    )
    train.add_argument("--output", type=Path, metavar="DIR", help="draft, log and state")
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
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes, memory and time for any K3's config.json instead, the full one's included",
    )
    train.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="with --dry-run: of a large target's draft, such as layers=5 or taps=5",
    )
    train.add_argument("--gpus", type=int, default=1, help="with --dry-run (default: %(default)s)")
    train.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    train.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    pad = actions.add_parser(
        "pad",
        help="pad a draft for a GPU",
        description="Write a copy for the K3 that `longhaul model pad` wrote with the same options.",
    )
    padding_command.add_arguments(pad, "draft", "the shipped one")


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, metavar="DIR", help="a K3 (default: the shipped one)")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="its draft (default: the shipped one)")


def run(args: argparse.Namespace) -> int:
    """Do as asked; 0 when it is done, 1 when it could not be, 2 for bad arguments."""
    actions = {"build": _build, "train": _train, "eval": _eval, "calibrate": _calibrate, "pad": _pad}
    return actions[args.action](args)


def _eval(args: argparse.Namespace) -> int:
    from model.training.command import note
    from speculative import evaluation
    from speculative.draft import DraftError

    stretches = (evaluation.Stretch(1024, 2, 4),) if args.quick else evaluation.STRETCHES
    try:
        result = evaluation.evaluate(*_pair(args), note, seed=args.seed, stretches=stretches)
        if args.output is not None:
            evaluation.write(args.output, result)
    except (DraftError, OSError) as error:
        print(f"longhaul draft eval: {error}", file=sys.stderr)
        return 1
    return _report(args, result, evaluation.show)


def _calibrate(args: argparse.Namespace) -> int:
    from model.training.command import note
    from speculative import calibration
    from speculative.draft import DraftError

    try:
        result = calibration.calibrate(*_pair(args), args.output, note, args.seed)
    except (DraftError, OSError) as error:
        print(f"longhaul draft calibrate: {error}", file=sys.stderr)
        return 1
    return _report(args, result, calibration.show)


def _pair(args: argparse.Namespace) -> tuple[Path, Path]:
    """The target and its draft, the shipped ones unless said otherwise."""
    from model import small
    from speculative.draft import SHIPPED

    target: Path = args.target or small.build(small.default_path())
    draft: Path = args.draft or SHIPPED
    return target.absolute(), draft.absolute()


def _report(args: argparse.Namespace, result: _Result, show: Callable[[_Result], None]) -> int:
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    from model import small
    from speculative import sizing
    from speculative.draft import DraftError
    from speculative.training import SIZES

    target: Path = args.target or small.SHIPPED
    names = sizing.Sizes.__slots__
    # The small K3's own draft, or one of the proportions of those published for the full one.
    given: dict[str, int] = {}
    if target == small.SHIPPED:
        given = {"taps": 3, **{name: SIZES[name] for name in names if name in SIZES}}
    for text in args.size:
        name, _, value = text.partition("=")
        if name not in names or not value.isdecimal() or int(value) < 1:
            print(f"longhaul draft train: --size {text}: give one of {', '.join(names)}", file=sys.stderr)
            return 2
        given[name] = int(value)
    try:
        load = sizing.Workload(args.steps or 2000, args.tokens, args.anchors, gpus=args.gpus)
        result = sizing.plan(target, sizing.Sizes(**given), load)
    except AssertionError:
        print(
            "longhaul draft train: --gpus must be positive, and heads a multiple of kv_heads", file=sys.stderr
        )
        return 2
    except DraftError as error:
        print(f"longhaul draft train: {error}", file=sys.stderr)
        return 1
    return _report(args, result, sizing.show)


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
    if args.dry_run:
        return _dry_run(args)
    if args.output is None:
        print("longhaul draft train: give --output, where the draft goes", file=sys.stderr)
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
    return _report(args, result, _show)


def _show(result: Mapping[str, Any]) -> None:
    from rich.console import Console

    Console().print_json(data=result)


def _pad(args: argparse.Namespace) -> int:
    from speculative import padding  # torch: not for `--help`
    from speculative.draft import SHIPPED

    args.source = args.source or SHIPPED
    return padding_command.run("longhaul draft pad", args, padding.pad)


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
