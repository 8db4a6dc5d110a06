"""From which accept length on a draft pays: how long a round takes with it, and a step without.

A round drafts a block and verifies it; how many of its tokens are accepted changes its time little, so that
any draft of the right shape will do, one of random weights too. With R seconds a round and S a step, decoding
is faster with a draft that is accepted for more than R / S tokens a round.

Several engines can be compared, each with further arguments for SGLang, spelled NAME: plain ARGUMENTS or
NAME: draft ARGUMENTS. One with the draft is divided by the plain one before it. As

    python -m bench.break_even --model DIR --draft DIR --contexts 1024 8192
    python -m bench.break_even --model DIR --draft DIR --profile h200-slice \
        --way 'triton: plain' --way 'triton, drafted: draft' \
        --way 'flashmla: plain --decode-attention-backend flashmla'
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.engines import Engine, EngineFailure, Way, boot_each, note
from bench.prefill import random_prompts
from model import small

_DEFAULT_WAYS: Final = ("without: plain", "with: draft")
_WARM_TOKENS: Final = 16


def read_way(text: str, draft: Path) -> tuple[str, Way]:
    """The name and the way that `NAME: plain|draft ARGUMENT ...` spells; raises ValueError."""
    name, colon, rest = text.partition(":")
    kind, *extra = shlex.split(rest) or [""]
    if not colon or not name.strip() or kind not in ("plain", "draft"):
        raise ValueError(f"{text!r}: write NAME: plain or NAME: draft, then SGLang's arguments")
    return name.strip(), Way(draft if kind == "draft" else None, tuple(extra))


def seconds_a_round(engine: Engine, context: int, tokens: int, repeats: int, vocabulary: int) -> list[float]:
    """Of each repeat, seconds a round (without a draft: a token) from the first token on."""
    prompt = next(random_prompts(vocabulary, context, context))
    engine.generate(prompt, _WARM_TOKENS)
    return [_time(engine, prompt, tokens) for _ in range(repeats)]


def _time(engine: Engine, prompt: Sequence[int], tokens: int) -> float:
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    arrivals: list[float] = []
    meta: dict[str, Any] = {}
    for event in engine.stream(body):
        arrivals.append(time.perf_counter())
        meta = event["meta_info"]
    written = int(meta.get("completion_tokens") or 0)
    if written < tokens:
        raise EngineFailure(f"/generate wrote {written} of {tokens} tokens")
    # The prefill makes the first token; what follows is rounds, or steps of one token.
    rounds = int(meta.get("spec_verify_ct") or 0) or written - 1
    return (arrivals[-1] - arrivals[0]) / rounds


def break_even(ways: Mapping[str, Way], found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Of each way with a draft, by context: its seconds a round by the plain way's a step before it."""
    result: dict[str, Any] = {}
    plain: Mapping[str, float] = {}
    for name, way in ways.items():
        if way.draft is None:
            plain = found.get(name, {})
        elif name in found:
            result[name] = {
                context: round(seconds / plain[context], 2)
                for context, seconds in found[name].items()
                if context in plain
            }
    return result


def main() -> int:
    """Measure and report; 0 when every engine did what it was asked, else 1 with what the others did."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench.break_even",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="checkpoint (default: the small K3)")
    parser.add_argument("--draft", type=Path, required=True, help="a DSpark draft of its shape")
    parser.add_argument("--profile", default="cpu-tiny", help="launch profile (default: %(default)s)")
    parser.add_argument("--way", action="append", metavar="WAY", help="default: one with, one without")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024], metavar="TOKENS", help="default: 1024"
    )
    parser.add_argument("--tokens", type=int, default=64, help="written each time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="the median counts (default: %(default)s)")
    parser.add_argument("--at-once", action="store_true", help="boot all engines at once")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the engines' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if min(args.tokens - 1, args.repeats, *args.contexts) < 1:
        parser.error("give at least 2 --tokens, and 1 of --repeats and --contexts")
    try:
        ways = dict(read_way(text, args.draft.absolute()) for text in args.way or _DEFAULT_WAYS)
    except ValueError as error:
        parser.error(f"--way {error}")
    model: Path = (args.model or small.build(small.default_path())).absolute()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # Special tokens lie at the end of the vocabulary.
    vocabulary = int(config["text_config"]["vocab_size"]) // 2
    found: dict[str, dict[str, float]] = {}
    status = 0
    with tempfile.TemporaryDirectory(prefix="longhaul-break-even-") as temporary:
        logs: Path = args.keep or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for name, engine in boot_each(model, args.profile, ways, logs, at_once=args.at_once):
                by_context = found.setdefault(name, {})
                for context in args.contexts:
                    times = seconds_a_round(engine, context, args.tokens, args.repeats, vocabulary)
                    by_context[str(context)] = statistics.median(times)
                    note(f"{name}, {context} tokens: {[round(1000 * one, 2) for one in times]} ms a round")
        except EngineFailure as error:
            # What was measured until then still counts.
            note(f"bench.break_even: {error}")
            status = 1
    result = {
        "profile": args.profile,
        "milliseconds": {
            name: {context: round(1000 * seconds, 3) for context, seconds in by_context.items()}
            for name, by_context in found.items()
        },
        "break_even_accept_length": break_even(ways, found),
    }
    if args.json:
        print(json.dumps(result))
    else:
        _show(result, args.contexts)
    return status


def _show(result: Mapping[str, Any], contexts: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    headings = [text for context in contexts for text in (f"{context}: ms a round", "pays from")]
    table = Table("way", *headings, title=result["profile"])
    for name, by_context in result["milliseconds"].items():
        pays = result["break_even_accept_length"].get(name, {})
        cells = [str(cell) for c in contexts for cell in (by_context.get(str(c), ""), pays.get(str(c), ""))]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
