"""The checks of `longhaul doctor` that boot no engine: versions, memory, compiler, hooks, Redis."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import redis

from cache_store.servers import RedisServer, ServerError, binary_version, find_binary, own_servers
from model import arguments
from model.engine import select_profile
from model.hardware import CPU_PROFILE, gpu_names
from model.profile import ProfileError, load_profile
from service.diagnosis import Check, CheckFailed
from service.stack import memory_bytes

SGLANG_VERSION = "0.5.23"
PYTHON_VERSIONS = ((3, 11), (3, 12))
# Measured with the tiny K3: HTTP server 1.1 GB, scheduler 1.3 GB, detokenizer 1.1 GB.
ENGINE_BYTES = 4 << 30
_GIB = 1 << 30
_HOOKS = """
import sys
from model.cpu.hooks import HOOKS, Process, apply_hooks
from model.cpu.registry import HookError
try:
    apply_hooks(Process.WORKER)
except HookError as error:
    sys.exit(f"HookError: {error}")
print(len(HOOKS))
"""
# What SGLang compiles at run time to name pages (mem_cache/cpp_utils/hash_binding.cpp) needs these; on a CPU
# `model.cpu.page_hash` takes its place.
_PROBE = """
#include <Python.h>
#include <openssl/sha.h>
#include <string>
extern "C" const void* probe(const unsigned char* text, unsigned char* digest) {
    std::string copy(reinterpret_cast<const char*>(text));
    Py_GetVersion();
    return SHA256(text, copy.size(), digest);
}
"""


def machine_checks(folder: Path) -> list[Check]:
    """The checks in order; `folder` takes what they write."""
    return [
        Check("python", _python),
        Check("packages", _packages),
        Check("memory", _memory),
        Check("compiler", lambda: _compiler(folder)),
        Check("profile", _profile, needs=("packages",)),
        Check("hooks", _hooks, needs=("packages",)),
        Check("redis", lambda: _redis(folder / "redis-check")),
    ]


def _python() -> str:
    found = platform.python_version()
    system = f"{platform.system()} {platform.machine()}"
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        raise CheckFailed(f"Python {found}", "use Python 3.11 or 3.12: make setup PYTHON=python3.12")
    if system != "Linux x86_64":
        raise CheckFailed(f"Python {found} on {system}", "run on Linux on x86-64, or use the container image")
    return f"Python {found} on {system}"


def _packages() -> str:
    found: dict[str, str] = {}
    for name in ("sglang", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise CheckFailed(f"{name} is not installed", "run `make setup`") from None
    if found["sglang"] != SGLANG_VERSION:
        raise CheckFailed(
            f"sglang {found['sglang']}, where {SGLANG_VERSION} is needed",
            "run `make setup`, which installs what uv.lock says",
        )
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _memory() -> str:
    free = min(psutil.virtual_memory().available, memory_bytes())
    cores = len(os.sched_getaffinity(0))
    detail = f"{free / _GIB:.1f} GiB free, {cores} cores"
    if free < ENGINE_BYTES:
        raise CheckFailed(
            detail, f"free {ENGINE_BYTES / _GIB:.0f} GiB: the engine needs that with the tiny K3"
        )
    return detail


def _compiler(folder: Path) -> str:
    if not gpu_names():
        return "none is needed without a GPU"
    remedy = "install a C++ compiler and the headers it needs: apt install g++ libssl-dev python3-dev"
    name = os.environ.get("CXX") or "c++"
    compiler = shutil.which(name) or shutil.which("g++")
    if compiler is None:
        raise CheckFailed(f"no C++ compiler ({name})", remedy)
    source = folder / "probe.cpp"
    source.write_text(_PROBE)
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    built = subprocess.run(
        [*command, str(source), "-o", str(folder / "probe.so"), "-lcrypto"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        lines = [line for line in built.stderr.splitlines() if "error" in line] or ["no message"]
        raise CheckFailed(
            f"{compiler} can't build what names the pages in the store: {lines[0].strip()}", remedy
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return (version.splitlines() or [compiler])[0]


def _profile() -> str:
    try:
        profile, found = select_profile(None)
        if profile.name != CPU_PROFILE:
            # The CPU's own arguments are proved by booting it.
            placeholders = [word for entry in profile.required for word in (entry.flag, "0")]
            command = profile.command(Path("model"), 1, store_url="redis://localhost", extra=placeholders)
            arguments.verify(profile.name, command)
    except ProfileError as error:
        raise CheckFailed(str(error), "pass --profile to `longhaul serve` and `longhaul engine`") from error
    return f"{profile.name} ({found})"


def _hooks() -> str:
    variables = load_profile(CPU_PROFILE).command(Path("model"), 1).env
    applied = subprocess.run(
        [sys.executable, "-c", _HOOKS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if applied.returncode != 0:
        last = (applied.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailed(
            last, f"run `make setup`: the hooks are written for sglang {SGLANG_VERSION} unchanged"
        )
    return f"{applied.stdout.split()[-1]} hooks in place"


def _redis(state: Path) -> str:
    remedy = "install another: apt install valkey-server (or redis-server)"
    try:
        binary = find_binary()
        version = ".".join(map(str, binary_version(binary)))
    except ServerError as error:
        raise CheckFailed(str(error), remedy) from error
    try:
        blobs, ledger = own_servers(state, blob_bytes=64 << 20)
        value = os.urandom(1 << 20)
        with blobs:
            client = _client(blobs)
            start = time.monotonic()
            client.set("page", value)
            same = client.get("page") == value
            elapsed_ms = (time.monotonic() - start) * 1000
        for _ in range(2):  # the second time from what the first left on disk
            with ledger:
                _client(ledger).setnx("turn", value)
                same = same and _client(ledger).get("turn") == value
    except (ServerError, redis.RedisError) as error:
        raise CheckFailed(f"{binary} {version}: {error}", remedy) from error
    if not same:
        raise CheckFailed(f"{binary} {version} gave back other bytes", remedy)
    return f"{binary.name} {version}: 1 MiB there and back in {elapsed_ms:.1f} ms, ledger kept over a restart"


def _client(server: RedisServer) -> "redis.Redis":
    return redis.Redis(unix_socket_path=str(server.socket), socket_timeout=10)
