"""Servers for measurements: started as processes, waited for, ended."""

import os
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.engines import free_port
from service.processes import HttpService
from service.stack import GATEWAY_START_TIMEOUT_S, gateway_service

HOST = "127.0.0.1"
_POLL_S = 0.05


class ServerFailure(RuntimeError):
    """A server that does not start; the message holds the end of its log."""


def await_ready(service: HttpService, timeout_s: float = GATEWAY_START_TIMEOUT_S) -> None:
    """Wait until a launched server is ready. Raises `ServerFailure`."""
    end = time.monotonic() + timeout_s
    while not service.is_ready():
        if service.poll() is not None or time.monotonic() > end:
            tail = service.log.read_text(errors="replace")[-2000:] if service.log.exists() else ""
            raise ServerFailure(f"{service.name} did not start; the end of {service.log}:\n{tail}")
        time.sleep(_POLL_S)


@contextmanager
def running(service: HttpService) -> Generator[HttpService]:
    """A server that is ready, and ended afterwards."""
    service.launch()
    try:
        await_ready(service)
        yield service
    finally:
        service.stop()


def python_server(
    name: str,
    argv: Sequence[str],
    scratch: Path,
    *,
    port: int | None = None,
    health: str = "/ready",
    env: Mapping[str, str] | None = None,
) -> tuple[HttpService, str]:
    """A server that takes `--port`, and its URL; `argv` without the interpreter, unless it has one."""
    port = port or free_port()
    program = list(argv) if Path(argv[0]).is_absolute() else [sys.executable, *argv]
    service = HttpService(
        name,
        [*program, "--port", str(port)],
        env={**os.environ, **(env or {})},
        health_url=f"http://{HOST}:{port}{health}",
        log=scratch / f"{name}.log",
        grace_s=2.0,
    )
    return service, f"http://{HOST}:{port}"


def local_gateway(
    engine_url: str,
    ledger_url: str,
    model: Path,
    scratch: Path,
    *,
    port: int | None = None,
    tenants: Path | None = None,
    extra: Sequence[str] = (),
) -> tuple[HttpService, str]:
    """A gateway on this machine, and its URL."""
    port = port or free_port()
    service = gateway_service(
        host=HOST,
        port=port,
        engine_urls=[engine_url],
        ledger_url=ledger_url,
        model=model,
        tenants=tenants,
        log=scratch / "gateway.log",
        extra=extra,
    )
    return service, f"http://{HOST}:{port}"
