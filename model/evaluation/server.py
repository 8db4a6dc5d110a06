"""A Longhaul of one's own for as long as an evaluation takes."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STOP_TIMEOUT_S = 60.0


class ServerFailure(RuntimeError):
    """`longhaul serve` did not start; what it said is on standard error."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Base URLs of the gateway and of the engine behind it, without `/v1`."""

    gateway: str
    engine: str


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: Path) -> Generator[Endpoints]:
    """`longhaul serve` with a state directory of its own, ended on leaving. Raises `ServerFailure`."""
    with tempfile.TemporaryDirectory(prefix="longhaul-eval-") as state:
        argv = [sys.executable, "-m", "service.cli", "serve", "--json", "--model", str(model)]
        argv += ["--state-dir", state, "--port", str(_free_port()), "--engine-port", str(_free_port())]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if not (line := process.stdout.readline()):
                    raise ServerFailure(f"longhaul serve ended with status {process.wait()}")
                ready = json.loads(line)
                yield Endpoints(ready["url"], ready["engine_url"])
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
