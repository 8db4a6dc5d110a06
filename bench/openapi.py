"""Whether requests made from the OpenAPI document bring the gateway down: schemathesis plays them.

Valid ones and ones that break the document, for every path, against a gateway with its ledger in Redis and a
stub engine. No answer may be a 5xx. schemathesis is installed into an environment of its own.

    python -m bench.openapi --json
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.crash import stack
from bench.engines import note
from bench.programs import installed

SCHEMATHESIS: Final = "schemathesis==4.32.5"
_GENERATED: Final = re.compile(r"(\d[\d,]*) generated")
_ARGUMENTS: Final = ("--checks", "not_a_server_error", "--no-color", "--request-timeout", "30")


def measure(scratch: Path, examples: int, seed: int) -> dict[str, Any]:
    """Start a gateway, let schemathesis at it, and report."""
    program = installed("schemathesis", SCHEMATHESIS)
    with stack(scratch, delay_ms=0.0) as processes:
        argv = [str(program), "run", f"{processes.url}/openapi.json", *_ARGUMENTS]
        argv += ["--max-examples", str(examples), "--seed", str(seed)]
        ended = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=scratch)
    note(ended.stdout[-3000:] + ended.stderr[-1000:])
    cases = sum(int(count.replace(",", "")) for count in _GENERATED.findall(ended.stdout))
    return {"cases": cases, "ok": ended.returncode == 0 and cases > 0, "status": ended.returncode}


def main() -> int:
    """Play and report; 0 when no answer was a server error."""
    parser = argparse.ArgumentParser(prog="python -m bench.openapi", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="at most, of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="longhaul-openapi-") as folder:
        report = measure(Path(folder), args.examples, args.seed)
    outcome = "no 5xx" if report["ok"] else "failed"
    print(json.dumps(report) if args.json else f"{report['cases']} cases, {outcome}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
