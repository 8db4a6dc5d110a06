"""A child process that never outlives the one that started it (Linux).

The child leads a session of its own, so that a Ctrl-C in the terminal reaches only its parent and so that
whatever it starts can be ended with it as one process group. The kernel signals the child when the thread
that started it ends, however that ends (PR_SET_PDEATHSIG, prctl(2)): start children from a thread that stays.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TETHER = Path(__file__).with_name("tether.py")
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Become the parent of whatever this process's children leave behind, so that it can be reaped at once.

    Else they become children of process 1, which in a container may be slow to reap, or never do it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ChildProcess:
    """A running child and its process group."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> "ChildProcess":
        """Start `argv` with its output appended to `log` (None: discarded).

        `env` is the whole environment (None: this process's). `keep_open` are file descriptors that the
        child inherits, such as a lock that must be held while it lives. `death_signal` is what the child
        gets when this process dies. Raises OSError when it can't be started.
        """
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(f"no program {argv[0]}")
        tether = [sys.executable, "-I", "-S", str(_TETHER), str(int(death_signal)), str(os.getpid())]
        sink = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            process = subprocess.Popen(
                [*tether, *argv],
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(keep_open),
            )
        finally:
            os.close(sink)
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float) -> int:
        """End the process and all that it started; returns the exit status.

        The process itself gets SIGTERM and `grace_s` seconds to end its children in its own way; then, and in
        any case for what is left of its group, SIGKILL.
        """
        if self.poll() is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        return self.kill()

    def kill(self) -> int:
        """End the whole process group at once; returns the exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        self._await_group()
        return status

    def _await_group(self, limit_s: float = 10.0) -> None:
        """Wait until nothing of the group is left, reaping what became this process's child."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            with suppress(ChildProcessError):
                os.waitpid(-self.pid, os.WNOHANG)
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            time.sleep(_POLL_S)
