"""The processes of one machine: how engine and gateway are started, how much the blob store may take."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from model.profile import EngineCommand
from service.processes import HttpService

ENGINE_HOST = "127.0.0.1"
# The first boot on a GPU compiles kernels and loads 1.5 TB of weights.
CUDA_START_TIMEOUT_S = 3600.0
CPU_START_TIMEOUT_S = 600.0
GATEWAY_START_TIMEOUT_S = 120.0
ENGINE_GRACE_S = 15.0
GATEWAY_GRACE_S = 35.0
_BLOB_SHARE = 8
_MIN_BLOB_BYTES = 256 << 20
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Memory that this process and its children may use: the machine's, or less in a container."""
    total = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):
            continue
    return total


def default_blob_bytes() -> int:
    """What the blob store may hold unless told otherwise: an eighth of the memory, at least 256 MiB."""
    return max(_MIN_BLOB_BYTES, memory_bytes() // _BLOB_SHARE)


def engine_service(command: EngineCommand, port: int, log: Path, name: str = "engine") -> HttpService:
    """The engine of `command`, which listens on `port`."""
    return HttpService(
        name,
        command.argv,
        env=command.environment(os.environ),
        health_url=f"http://{ENGINE_HOST}:{port}/health",
        log=log,
        grace_s=ENGINE_GRACE_S,
    )


def gateway_service(
    *,
    host: str,
    port: int,
    engine_urls: Sequence[str],
    ledger_url: str,
    model: Path,
    tenants: Path | None,
    log: Path,
    store_url: str | None = None,
    extra: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
) -> HttpService:
    """The gateway in front of engines whose blob store is at `store_url`; `extra` are more options."""
    argv = [sys.executable, "-m", "service.cli", "gateway", "--host", host, "--port", str(port)]
    argv += [word for url in engine_urls for word in ("--engine", url)]
    argv += ["--ledger", ledger_url, "--model", str(model)]
    if store_url is not None:
        argv += ["--store", store_url]
    if tenants is not None:
        argv += ["--tenants", str(tenants)]
    argv += extra
    return HttpService(
        "gateway",
        argv,
        env=env,
        health_url=f"http://{reachable(host)}:{port}/ready",
        log=log,
        grace_s=GATEWAY_GRACE_S,
    )


def reachable(host: str) -> str:
    """An address under which this machine reaches a server bound to `host`, as it stands in a URL."""
    if host == "0.0.0.0":
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
