"""Replay agent traces against an OpenAI-compatible endpoint.

Sends the recorded sessions, their sub-agents beside their parents, as filler text that has the token counts
and the shared prefixes that the trace's block hashes say; reports latencies and how much of the prefix that
an infinite cache would have hit was hit. `longhaul replay compare A.json B.json` puts two runs that --output
has written beside each other.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from replay import compare, options
from replay.calibration import Calibration, mark_tokens, measure
from replay.client import ChatClient
from replay.errors import EndpointError, ReplayError
from replay.html import page
from replay.layout import NO_OVERHEAD, Planner
from replay.metrics import Counters
from replay.progress import ReplayProgress
from replay.record import Record
from replay.render import document, request_rows, tables
from replay.report import Report, make_report
from replay.rules import invalid_because
from replay.run import Replay
from replay.scale import Scale
from replay.schedule import IdleCapClock, Pace, SystemClock
from replay.selection import fitting, largest_scale, load
from replay.trace import Session

EXAMPLES = """\
  longhaul replay traces/                   # a folder, as small as the model's context needs
  longhaul replay a.json b.json c.json --concurrency 3 --scale 1/32
  longhaul replay traces/ --url https://host --model kimi-k3 --api-key-env KIMI_KEY --max-sessions 20
  longhaul replay traces/ --scenario agentx --concurrency 8 --url https://host
  longhaul replay chat.jsonl --arrivals trace --time-scale 1
  longhaul replay compare before.json after.json --html both.html
  longhaul replay traces/ --tokenizer models/kimi-k3 --seed 7 --json --output replay.json
"""
EXIT_ERRORS = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
console = Console(stderr=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="trace files or folders of them, in any format that `longhaul trace` reads",
    )
    add("--url", default="http://127.0.0.1:8000", help="the endpoint's root (default: %(default)s)")
    add("--model", help="the model's name (default: the first that the endpoint lists)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--concurrency", type=options.positive, default=3, help="live session trees (default: %(default)s)")
    add(
        "--scale",
        default="auto",
        help="factor for all token counts, such as 1/32 (default: 1, or the largest of 1/2, 1/4, ... "
        "that fits the model's context)",
    )
    add(
        "--time-scale",
        type=options.not_negative,
        help="factor for all gaps between turns (default: the scale)",
    )
    add(
        "--idle-cap",
        type=options.not_negative,
        default=300.0,
        metavar="SECONDS",
        help="longest gap, in seconds of the trace (default: %(default)s)",
    )
    add("--max-sessions", type=options.positive, metavar="N", help="only the first N sessions")
    add("--max-turns", type=options.positive, metavar="N", help="only the first N turns of each conversation")
    add(
        "--max-context",
        type=options.positive,
        metavar="TOKENS",
        help="leave out sessions with a request above this, scaled, output included",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the model's tokenizer.json (default: find one-token words by asking the endpoint)",
    )
    add(
        "--seed", type=int, help="makes the text reproducible (default: a new one, so that no cache knows it)"
    )
    add(
        "--timeout",
        type=options.positive,
        default=600,
        metavar="SECONDS",
        help="longest silence of the endpoint (default: %(default)s)",
    )
    add(
        "--error-limit",
        type=options.not_negative,
        metavar="SHARE",
        help="share of failed requests from which on the exit status is 1 (default: 0.01)",
    )
    options.add_rules(parser)
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--output", type=Path, metavar="FILE", help="write the JSON, with a row per request, to a file")
    add("--html", type=Path, metavar="FILE", help="write a report to look at, one file, to a file")


def run(args: argparse.Namespace) -> int:
    """Replay and report; 0, or 1 over the error limit, 2 when nothing could be replayed, 130 after Ctrl-C."""
    if args.paths[0] == Path(compare.NAME):
        return compare.run(args.paths[1:], args.html, as_json=args.json)
    try:
        api_key = _api_key(args.api_key_env)
        if (args.arrivals == "poisson") != (args.rate is not None):
            raise ReplayError("--rate: belongs to --arrivals poisson, which needs it")
        sessions = load(args.paths, args.max_sessions, args.max_turns)
        outcome = uvloop.run(_replay(args, sessions, api_key))
        result = outcome.document
        rows = {**result, "requests": request_rows(outcome.records)}
        if args.html is not None:
            args.html.write_text(page([(args.html.stem, rows)]), encoding="utf-8")
        if args.output is not None:
            args.output.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2) + b"\n")
    except (ReplayError, OSError) as error:
        _complain(error)
        return EXIT_UNUSABLE
    if args.json:
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        Console().print(tables(outcome.report))
        if args.scenario != "none":
            _print_verdict(result)
    if outcome.stopped:
        console.print(
            f"longhaul replay: {outcome.stopped}", style="red", highlight=False, markup=False, soft_wrap=True
        )
    if outcome.interrupted:
        return EXIT_INTERRUPTED
    return 0 if outcome.ok else EXIT_ERRORS


def _print_verdict(result: dict[str, Any]) -> None:
    out = Console(highlight=False, markup=False)
    if result["valid"]:
        out.print(f"valid under {result['scenario']}")
    for reason in result["invalid_because"]:
        out.print(f"not valid under {result['scenario']}: {reason}")


def _complain(problem: object) -> None:
    console.print(f"longhaul replay: {problem}", style="red", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Outcome:
    report: Report
    records: list[Record]
    document: dict[str, Any]
    ok: bool
    interrupted: bool
    stopped: str | None


async def _replay(args: argparse.Namespace, sessions: list[Session], api_key: str | None) -> _Outcome:
    client = ChatClient(args.url, api_key=api_key, timeout_s=args.timeout)
    async with client:
        await client.connect(args.model)
        seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
        scale = _scale(args.scale, sessions, client.context_tokens)
        sessions, skipped = fitting(sessions, scale, args.max_context)
        if skipped:
            console.print(f"left out above {args.max_context:,} tokens: {', '.join(skipped)}")
        words, calibration = await measure(client, args.tokenizer, seed)
        _warn(client, calibration)
        rules = options.rules(args)
        # Where the template comes on top of the trace's counts, so does the mark.
        replaces = rules.cache_bust and rules.count_template
        bust_tokens = await mark_tokens(client, words) if replaces else 0
        pace = Pace(float(scale.factor) if args.time_scale is None else args.time_scale, args.idle_cap)
        turns = None if rules.recycle else sum(session.turns for session in sessions)
        capped = rules.system_idle_cap_s
        clock = SystemClock() if capped is None else IdleCapClock(capped * pace.time_scale)
        with ReplayProgress(turns, console) as progress:
            replay = Replay(
                client=client,
                planner=Planner(
                    scale,
                    calibration.overhead if rules.count_template else NO_OVERHEAD,
                    rules.cut_tails,
                ),
                words=words,
                pace=pace,
                clock=clock,
                concurrency=args.concurrency,
                seed=seed,
                on_record=progress.add,
                rules=rules,
                starts=options.starts(args, sessions, seed, pace.time_scale),
                bust_tokens=bust_tokens,
                live=args.live,
            )
            before = await _counters(client)
            interrupted, stopped = await _until_interrupted(replay, sessions)
        report = make_report(replay.records)
        counted = (await _counters(client)).since(before)
        report = dataclasses.replace(report, accept_length=counted.accept_length)
        tiers_source = "usage" if report.total.tiers is not None else None
        if tiers_source is None and counted.cached_tokens:
            total = dataclasses.replace(report.total, tiers=counted.cached_tokens)
            report = dataclasses.replace(report, total=total)
            tiers_source = "metrics"
    measured_s = max(0.0, (replay.end_s or 0.0) - replay.begin_s) if replay.begin_s is not None else 0.0
    invalid = invalid_because(
        rules,
        report,
        replay.records,
        forced=client.forcing.accepted,
        scale=str(scale),
        time_scale=pace.time_scale,
        live=args.concurrency if rules.recycle else len(sessions),
        concurrency=args.concurrency,
        measured_s=measured_s,
        from_answers=args.live,
    )
    if interrupted or stopped is not None:
        invalid.insert(0, "the run ended before its time")
    ok = not interrupted and stopped is None and report.error_rate <= rules.error_limit
    about = {
        "ok": ok,
        "interrupted": interrupted,
        "stopped": stopped,
        "url": client.url,
        "model": client.model,
        "concurrency": args.concurrency,
        "scale": str(scale),
        "time_scale": pace.time_scale,
        "idle_cap_s": pace.idle_cap_s,
        "seed": seed,
        "skipped_sessions": skipped,
        "words": len(words),
        "template_tokens": dataclasses.asdict(calibration.overhead),
        "template_residual_tokens": calibration.residual_tokens,
        "forced": client.forcing.accepted,
        "tiers_source": tiers_source,
        "scenario": args.scenario,
        "rules": dataclasses.asdict(rules),
        "arrivals": args.arrivals,
        "live": args.live,
        "valid": not invalid,
        "invalid_because": invalid,
        "measured_s": measured_s,
        "warm_up_requests": len(replay.warm_up_records),
        "idle_skipped_s": clock.skipped_s if isinstance(clock, IdleCapClock) else 0.0,
    }
    return _Outcome(report, replay.records, document(report, about), ok, interrupted, stopped)


async def _until_interrupted(replay: Replay, sessions: Sequence[Session]) -> tuple[bool, str | None]:
    """Run the replay; whether Ctrl-C ended it, and which error of the endpoint did."""
    task = asyncio.ensure_future(replay.run(sessions))
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    except EndpointError as error:
        return interrupted, str(error)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return interrupted, None


def _warn(client: ChatClient, calibration: Calibration) -> None:
    refused = [name for name, accepted in client.forcing.accepted.items() if not accepted]
    if "ignore_eos" in refused or "min_tokens" in refused:
        console.print(f"the endpoint refuses {', '.join(refused)}: outputs may end early", style="yellow")
    if calibration.residual_tokens:
        console.print(
            f"the chat template is not additive: a long prompt has {calibration.residual_tokens:+} tokens",
            style="yellow",
        )


async def _counters(client: ChatClient) -> Counters:
    page = await client.metrics()
    try:
        return Counters.of(page or "")
    except ValueError:
        return Counters()


def _scale(text: str, sessions: Sequence[Session], context_tokens: int | None) -> Scale:
    if text != "auto":
        try:
            return Scale.parse(text)
        except ValueError as error:
            raise ReplayError(f"--scale: {error}") from error
    scale = largest_scale(sessions, context_tokens)
    if scale != Scale():
        console.print(
            f"scale {scale}: at more, requests would not fit the context of {context_tokens:,} tokens"
        )
    return scale


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ReplayError(f"--api-key-env {variable}: the environment has no such variable")
    return key
