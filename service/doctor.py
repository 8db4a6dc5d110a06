"""Check this machine in one go, and say what to do about each failure.

The quick checks look at versions, memory, the compiler, the hooks and Redis. The others boot the real engine
with the tiny K3 on the CPU, compare a greedy answer with a reference, continue the turn from the cache, kill
the engine and continue from storage. All this happens on ports of its own and in a directory that is removed
afterwards: a running `longhaul serve` is not disturbed.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.diagnosis import Check, Finding, examine
from service.display import Display
from service.doctor_engine import EngineTrial
from service.doctor_machine import machine_checks
from service.supervisor import Supervisor

EXAMPLES = """\
  longhaul doctor
  longhaul doctor --skip-engine --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longhaul doctor`."""
    parser.add_argument("--skip-engine", action="store_true", help="the quick checks alone: boot no engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the checks: 0 when all pass, 1 when one fails, 130 when interrupted."""
    display = Display()
    supervisor = Supervisor(display)

    def before(check: Check) -> None:
        display.busy(f"checking {check.name}", 0.0)

    def after(finding: Finding) -> None:
        if finding.ok:
            display.done(finding.name, finding.seconds)
        else:
            display.note(f"{finding.name}: {finding.detail}", "red")

    with tempfile.TemporaryDirectory(prefix="longhaul-doctor-") as folder, supervisor.signals():
        checks = machine_checks(Path(folder))
        if not args.skip_engine:
            checks += EngineTrial(Path(folder), supervisor).checks()
        try:
            findings = examine(checks, before, after)
        except KeyboardInterrupt:
            return 130
        finally:
            supervisor.stop()
            display.close()
    ok = all(finding.ok for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    return 0 if ok else 1


def _show(findings: list[Finding]) -> None:
    table = Table("", "check", "s", "what was seen", "what to do")
    for finding in findings:
        mark = Text("✓", "green") if finding.ok else Text("✗", "red")
        seen, remedy = Text(finding.detail), Text(finding.remedy)
        table.add_row(mark, finding.name, f"{finding.seconds:.1f}", seen, remedy)
    Console().print(table)
