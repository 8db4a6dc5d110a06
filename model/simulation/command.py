"""Simulate K3's cache tiers under agent traffic.

A discrete-event simulator of HBM (KV pages and state slots, evicted as SGLang evicts them), host memory and
Redis (bandwidth, our retention), driven by traces at their real size, or by made-up sessions like
InferenceX's. Compares SGLang alone with what Redis and admission change.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console

from model.simulation import options
from model.simulation.chart import draw
from replay.errors import ReplayError

EXAMPLES = """\
  longhaul simulate traces/ --concurrency 16,32,48,64
  longhaul simulate traces/ --kv-dtype fp8 --kv-tokens 3250000 --policy sglang,redis --json
  longhaul simulate --context 142000 --output 444 --turns 65 --svg curve.svg
"""
EXIT_UNUSABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="trace files or folders (default: made-up sessions)",
    )
    options.add_arguments(parser)
    parser.add_argument(
        "--concurrency",
        type=options.counts,
        default=[8, 16, 32, 48, 64, 96],
        metavar="N,N",
        help="live sessions (default: 8,16,32,48,64,96)",
    )
    parser.add_argument(
        "--policy",
        type=options.policies,
        default=options.policies("all"),
        metavar="NAME,NAME",
        help="sglang, admission, redis, redis+admission (default: all)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves")


def run(args: argparse.Namespace) -> int:
    """Simulate and report; 0, or 2 when that can't be done."""
    try:
        machine, found = options.machine_and_budget(args)
        made = options.workload(args, args.paths, found)
        begin_s = time.perf_counter()
        points = options.sweep(args, machine, found, made, args.policy, args.concurrency)
        wall_s = time.perf_counter() - begin_s
        if args.svg is not None:
            title = f"{machine.name}: {found.kv_tokens / 1e6:.2f}M tokens of KV, {found.state_slots} states"
            args.svg.write_text(draw(points, title), encoding="utf-8")
    except (ReplayError, options.PlanError, OSError) as error:
        options.complain("simulate", error)
        return EXIT_UNUSABLE
    requests = sum(point.requests for point in points)
    if args.json:
        result = {
            "machine": asdict(machine),
            "budget": asdict(found),
            "sessions": len(made),
            "requests": requests,
            "wall_s": wall_s,
            "points": [options.document(point) for point in points],
        }
        sys.stdout.write(orjson.dumps(result).decode() + "\n")
    else:
        console = Console()
        console.print(options.tables(points))
        console.print(f"{requests:,} requests simulated in {wall_s:.1f} s", highlight=False)
    return 0
