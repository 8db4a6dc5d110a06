"""Look at traces, and convert them.

`stats` says what a trace is like, in any format that `longhaul replay` reads: Weka, Mooncake (plain and with
sessions), raw payload folders, inputs.json, TraceLab rows, Claude Code logs, SWE-agent trajectories.
`convert` writes them in the Weka format, one file a session: lengths, prefixes and times, no text.
"""

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.console import Console
from rich.table import Table

from replay.errors import ReplayError
from replay.formats.weka import weka_document
from replay.selection import load
from replay.statistics import WINDOW_TOKENS, Sample, Statistics, statistics
from replay.trace import Session

EXAMPLES = """\
  longhaul trace stats traces/ --json
  longhaul trace convert ~/.claude/projects/my-project --to traces/mine
  longhaul trace convert run.traj --to traces/swe --gap 10
"""
EXIT_UNUSABLE = 2
SAMPLES = ("turns", "input", "output", "appended", "gap", "peak")
console = Console(stderr=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stats = actions.add_parser("stats", help="sizes, prefixes and gaps of traces")
    convert = actions.add_parser("convert", help="write traces in the Weka format")
    for action in (stats, convert):
        action.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="trace files or folders")
        action.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    convert.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write to")
    convert.add_argument(
        "--gap",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="between turns of traces that tell no times (default: %(default)s, the median of agents)",
    )


def run(args: argparse.Namespace) -> int:
    """Print statistics or convert; 0, or 2 when a trace can't be read."""
    try:
        sessions = load(args.paths)
        if not sessions:
            raise ReplayError(f"no session in {', '.join(map(str, args.paths))}")
        if args.action == "convert":
            result: dict[str, Any] = {"files": convert(sessions, args.to, args.gap)}
            report = f"{len(sessions)} sessions written to {args.to}"
        else:
            found = statistics(sessions)
            result, report = document(found), table(found)
    except (ReplayError, OSError) as error:
        console.print(f"longhaul trace: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return EXIT_UNUSABLE
    if args.json:
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        Console().print(report)
    return 0


def convert(sessions: Sequence[Session], folder: Path, gap_s: float) -> list[str]:
    """Write each session to a file of the folder; the paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    names: Counter[str] = Counter()
    paths: list[str] = []
    for session in sessions:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", session.name).strip(".-") or "session"
        names[name] += 1
        suffix = f"-{names[name]}" if names[name] > 1 else ""
        path = folder / f"{name}{suffix}.json"
        path.write_bytes(orjson.dumps(weka_document(spaced(session, gap_s))) + b"\n")
        paths.append(str(path))
    return paths


def spaced(session: Session, gap_s: float) -> Session:
    """The session, its requests `gap_s` apart where the trace told no times at all."""
    if any(request.start_s or request.service_s for agent in session.agents for request in agent.requests):
        return session
    agents = tuple(
        dataclasses.replace(
            agent,
            requests=tuple(
                dataclasses.replace(request, start_s=number * gap_s)
                for number, request in enumerate(agent.requests)
            ),
            end_s=max(0, len(agent.requests) - 1) * gap_s,
        )
        for agent in session.agents
    )
    return dataclasses.replace(session, agents=agents)


def document(found: Statistics) -> dict[str, Any]:
    """The statistics as one JSON object."""
    values = dataclasses.asdict(found)
    for name in SAMPLES:
        sample: Sample | None = getattr(found, name)
        values[name] = None if sample is None else {"mean": sample.mean, **_percentiles(sample)}
    return values


def _percentiles(sample: Sample) -> dict[str, float]:
    found = sample.percentiles
    return {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.most}


def table(found: Statistics) -> Table:
    """The statistics as a table; what is not told in the trace is left blank."""
    rows: dict[str, Sample | None] = {
        "requests per session": found.turns,
        "input tokens": found.input,
        "output tokens": found.output,
        "appended tokens": found.appended,
        "gap between turns, s": found.gap,
        "peak context tokens": found.peak,
    }
    hit, idle = f"{found.theoretical_hit:.1%}", "-" if found.idle is None else f"{found.idle:.1%}"
    made = Table(
        title=f"{found.sessions:,} sessions, {found.requests:,} requests, {found.subagents:,} sub-agents",
        caption=f"theoretical prefix hit rate {hit}, idle {idle}, "
        f"{found.sessions_within_window:,} sessions never above {WINDOW_TOKENS:,} tokens",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    made.add_column("")
    for name in ("mean", "p50", "p90", "p99", "max"):
        made.add_column(name, justify="right")
    for name, sample in rows.items():
        digits = 1 if "gap" in name else 0
        values = [] if sample is None else [sample.mean, *_percentiles(sample).values()]
        made.add_row(name, *(f"{value:,.{digits}f}" for value in values))
    return made
