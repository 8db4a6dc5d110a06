"""A lock on a directory that ends with the processes that hold it (flock(2)): no stale lock files."""

import fcntl
import os
import time
from pathlib import Path

import psutil

# What a process that was killed leaves: its servers need a moment to close the files that they inherited.
_LEAVING_S = 5.0
_POLL_S = 0.05


class DirectoryInUse(RuntimeError):
    """Another process holds the directory; the message names both."""


class DirectoryLock:
    """Holds `<directory>/lock`, which contains the id of the process that took it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The open file: a child that inherits it holds the lock too. Only while it is held."""
        assert self._descriptor is not None, "not held"
        return self._descriptor

    def acquire(self) -> None:
        """Take the lock, waiting a few seconds for one whose holder has died; raises `DirectoryInUse`."""
        assert self._descriptor is None, "held already"
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _LEAVING_S
        while not _try(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            has_died = holder.isdecimal() and not psutil.pid_exists(int(holder))
            if has_died and time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            os.close(descriptor)
            raise DirectoryInUse(
                f"{self._directory} is in use by process {holder or 'unknown'}: stop that `longhaul serve`, "
                "or give this one another --state-dir"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it free, as far as this process is concerned; harmless when it isn't held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
