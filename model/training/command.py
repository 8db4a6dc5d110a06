"""`longhaul model train`: trains the small K3 from nothing but this repository."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SMALL: Final = Path(__file__).parents[1] / "k3_small"
"""Where the shipped weights live."""

_VOCABULARY_SESSIONS: Final = 200
_VOCABULARY_SOURCES: Final = 40


def add_arguments(actions: Any) -> None:
    """Declare `longhaul model train`."""
    train = actions.add_parser(
        "train",
        help="train the small K3",
        description="Train the small K3 on generated agent sessions. A run goes on from the state it left.",
    )
    train.add_argument("--output", type=Path, required=True, metavar="DIR", help="checkpoint, log and state")
    train.add_argument("--minutes", type=float, default=13.0, help="of training (default: %(default)s)")
    train.add_argument(
        "--wall", type=float, metavar="MINUTES", help="limit of the whole run: trains less to fit"
    )
    train.add_argument("--steps", type=int, help="train for so many steps instead")
    train.add_argument("--from", type=float, default=0.0, dest="start", metavar="SHARE", help="part of the")
    train.add_argument("--to", type=float, default=1.0, dest="end", metavar="SHARE", help="schedule to run")
    train.add_argument("--weights", type=Path, metavar="DIR", help="begin with this checkpoint's weights")
    train.add_argument("--peak", type=float, default=1.0, help="factor of the rates (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    train.add_argument("--tokens", type=int, default=65536, help="a batch (default: %(default)s)")
    train.add_argument(
        "--longest", type=int, default=32768, help="tokens of a sequence (default: %(default)s)"
    )
    train.add_argument("--workers", type=int, help="processes that draw data (default: cores but two)")
    train.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    train.add_argument("--no-compile", action="store_true", help="run plain torch")
    train.add_argument("--no-state", action="store_true", help="leave nothing to resume from")
    train.add_argument("--size", action="append", default=[], metavar="NAME=N", help="override a size")
    train.add_argument(
        "--vocabulary",
        action="store_true",
        help="learn the vocabulary anew instead of taking the shipped one",
    )
    train.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    pack = actions.add_parser(
        "pack",
        help="ship what a training run left",
        description="Write the shipped checkpoint and its card from a run's weights and log.",
    )
    pack.add_argument("source", type=Path, metavar="DIR", help="holds model-*.safetensors and log.jsonl")
    pack.add_argument("--output", type=Path, default=SMALL, metavar="DIR", help="default: %(default)s")
    pack.add_argument("--seed", type=int, default=0, help="that the run had (default: %(default)s)")


def run_pack(args: argparse.Namespace) -> int:
    """Pack; 0 when the checkpoint stands, 1 when it could not be written."""
    from model.training.pack import pack

    try:
        summary = pack(args.source, args.output, args.seed)
    except (OSError, ValueError) as error:
        print(f"longhaul model pack: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"path": str(args.output), **summary}))
    return 0


def run(args: argparse.Namespace) -> int:
    """Train; 0 when the checkpoint stands, 1 when training failed, 2 for bad arguments."""
    import torch

    from model.training.run import Plan, Run

    torch.set_float32_matmul_precision("high")
    device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        plan = Plan(
            output=args.output,
            seed=args.seed,
            minutes=args.minutes,
            wall_minutes=args.wall,
            steps=args.steps,
            start=args.start,
            end=args.end,
            peak=args.peak,
            tokens=args.tokens,
            longest=args.longest,
            workers=args.workers or max(1, (os.cpu_count() or 4) - 2),
            device=device,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            is_compiled=not args.no_compile and device == "cuda",
            weights=args.weights,
            sizes=_sizes(args.size),
            keeps_state=not args.no_state,
        )
    except ValueError as error:
        print(f"longhaul model train: {error}", file=sys.stderr)
        return 2
    vocabulary = _vocabulary(args)
    try:
        training = Run(plan, vocabulary, note)
        with Progress() as report:
            result = training.train(report)
    except (OSError, FloatingPointError, KeyError) as error:
        print(f"longhaul model train: {error}", file=sys.stderr)
        return 1
    result["path"] = str(plan.output)
    if args.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console

    Console().print_json(data=result)
    return 0


def _sizes(given: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise ValueError(f"--size {text}: give NAME=N, such as num_hidden_layers=4")
        sizes[name] = int(value)
    return sizes


def _vocabulary(args: argparse.Namespace) -> str:
    shipped = SMALL / "tokenizer.json"
    if shipped.is_file() and not args.vocabulary:
        return shipped.read_text(encoding="utf-8")
    from model.training.documents import corpus
    from model.training.geometry import VOCAB_SIZE
    from model.vocabulary import train

    note("learning the vocabulary")
    return train(list(corpus(args.seed, _VOCABULARY_SESSIONS, _VOCABULARY_SOURCES)), VOCAB_SIZE)


def note(text: str) -> None:
    """Say something on standard error."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """How far training is, told on standard error: a bar on a terminal, lines elsewhere."""

    def __enter__(self) -> Callable[[float, str], None]:
        """A function that takes the share done and a line."""
        self._bar: Any = None
        if not sys.stderr.isatty():
            return lambda done, line: note(f"{done:6.1%} {line}")
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
        )
        self._bar.start()
        task = self._bar.add_task("training", total=1.0)
        return lambda done, line: self._bar.update(task, completed=done, description=line)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
