"""Whether any fault of the store makes a wrong byte, a wrong answer, a hung request or a dead thread.

First the store alone, with a real server behind a proxy that spoils traffic: values are written and read
under every fault, and each byte that comes is compared. Then a real engine over the same: several requests at
a time, each answer compared with the float32 reference, which has no cache. After each fault everything must
work again. `added_ms_p99` is what a store that does not answer adds to a request. Exit status 1 unless all
of it holds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import fault_engine, fault_store
from bench.engines import note, running_engine
from bench.fault_cases import Bed
from bench.fault_proxy import FaultProxy
from bench.redis_process import RedisProcess
from model import tiny
from model.profile import load_profile

STORE_DEADLINE_S = 0.2
READS = 10_000
REQUESTS = 300
PROFILE = "cpu-tiny"


@contextmanager
def bed(folder: Path, deadline_s: float) -> Generator[Bed]:
    """A server and a proxy before it."""
    folder.mkdir()
    server = RedisProcess(folder)
    server.start()
    try:
        with FaultProxy(("127.0.0.1", server.port)) as proxy:
            yield Bed(server, proxy, deadline_s)
    finally:
        server.kill()


def measure(model: Path, reads: int, requests: int, folder: Path, log: Path) -> dict[str, Any]:
    """Play all faults; returns the report."""
    report: dict[str, Any] = {"wrong_bytes": 0, "wrong_outputs": 0, "hung_requests": 0, "dead_threads": 0}
    if reads:
        with bed(folder / "s", STORE_DEADLINE_S) as store_bed:
            report["store"] = found = fault_store.measure(store_bed, reads, note)
        report["faulted_reads"] = found["reads"]
        report["wrong_bytes"] = found["wrong_bytes"]
        report["dead_threads"] += found["dead_threads"] + len(found["unrecovered"])
    if requests:
        deadline_s = load_profile(PROFILE).store.timeout_s
        with (
            bed(folder / "e", deadline_s) as engine_bed,
            running_engine(model, log, profile=PROFILE, store_url=engine_bed.proxy.url) as engine,
        ):
            report["engine"] = found = fault_engine.measure(engine, model, engine_bed, requests, note)
        report["faulted_requests"] = found["requests"]
        for name in ("wrong_outputs", "hung_requests", "failed_requests", "added_ms_p99"):
            report[name] = found[name]
        report["deadline_ms"] = round(1000 * deadline_s)
        report["dead_threads"] += len(found["unrecovered"])
    return report


def holds(report: Mapping[str, Any]) -> bool:
    """Whether nothing was wrong, and every fault was named."""
    counted = ("wrong_bytes", "wrong_outputs", "hung_requests", "failed_requests", "dead_threads")
    parts = [report[name] for name in ("store", "engine") if name in report]
    return (
        not any(report.get(name) for name in counted)
        and not any(part["unnamed"] for part in parts)
        and report.get("added_ms_p99", 0) <= report.get("deadline_ms", 0)
    )


def main() -> int:
    """Measure and report; 0 when no fault did harm."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument(
        "--reads", type=int, default=READS, help="of the store alone; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="to an engine; 0: none (default: %(default)s)"
    )
    parser.add_argument("--log", type=Path, help="where the engine's log goes (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.reads < 0 or args.requests < 0:
        parser.error(f"--reads {args.reads}, --requests {args.requests}: give none or more")
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with tempfile.TemporaryDirectory(prefix="lh") as folder:
        log: Path = args.log or Path(folder, "engine.log")
        report = measure(model, args.reads, args.requests, Path(folder), log)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if holds(report) else 1


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for part in ("store", "engine"):
        if part not in report:
            continue
        cases: Mapping[str, Mapping[str, Any]] = report[part]["cases"]
        names = [name for name in next(iter(cases.values())) if name != "errors"]
        table = Table("fault", *names, "errors by kind", title=f"the {part} under faults")
        for case, found in cases.items():
            kinds = " ".join(f"{kind} {count}" for kind, count in found["errors"].items())
            table.add_row(case, *(str(found[name]) for name in names), kinds)
        console.print(table)
    console.print(
        " ".join(f"{name}={value}" for name, value in report.items() if not isinstance(value, dict))
    )


if __name__ == "__main__":
    sys.exit(main())
