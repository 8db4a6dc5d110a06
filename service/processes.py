"""What `longhaul serve` runs: services as processes, and the guardian that outlives a killed supervisor."""

import http.client
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from cache_store.process import ChildProcess

HEALTH_TIMEOUT_S = 5.0
_GUARDIAN = Path(__file__).with_name("guardian.py")


class Service(Protocol):
    """A process that is launched, becomes ready, runs, and is stopped; then it can be launched again."""

    @property
    def name(self) -> str:
        """How it is called in messages."""
        ...

    @property
    def log(self) -> Path:
        """Where its output goes."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id, equal to that of its group; None while it doesn't run."""
        ...

    def launch(self) -> None:
        """Start it without waiting."""
        ...

    def is_ready(self) -> bool:
        """Whether it does its work."""
        ...

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        ...

    def stop(self) -> None:
        """End it and all that it started; harmless when it doesn't run."""
        ...


class HttpService:
    """A program that is ready when GET `health_url` answers 200."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        health_url: str,
        log: Path,
        grace_s: float,
    ) -> None:
        """`env` is the whole environment; `grace_s` is what it gets between SIGTERM and SIGKILL."""
        parts = urlsplit(health_url)
        assert parts.scheme == "http" and parts.hostname is not None and parts.port is not None, health_url
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._env = dict(env)
        self._address = (parts.hostname, parts.port)
        self._path = parts.path or "/"
        self._grace_s = grace_s
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._child is None else self._child.pid

    def launch(self) -> None:
        """Start the program; raises OSError when it can't be."""
        assert self._child is None, f"{self.name} runs already"
        self._child = ChildProcess.start(self._argv, log=self.log, env=self._env)

    def is_ready(self) -> bool:
        """Whether the health URL answers 200."""
        connection = http.client.HTTPConnection(*self._address, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", self._path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def poll(self) -> int | None:
        """Exit status, or None while it runs; it must have been launched."""
        assert self._child is not None, f"{self.name} was not launched"
        return self._child.poll()

    def stop(self) -> None:
        """End the program and its process group."""
        if self._child is not None:
            self._child.stop(self._grace_s)
            self._child = None


class Guardian:
    """A process that ends the others when this one dies without doing it itself (`service.guardian`)."""

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARDIAN)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        self._pipe: int | None = write_end

    def watch(self, group: int, grace_s: float) -> None:
        """End this process group when the present process is gone, `grace_s` after."""
        self._say(f"+{group} {grace_s}\n")

    def release(self, group: int) -> None:
        """The group has ended: its number may come to mean another."""
        self._say(f"-{group}\n")

    def fire(self) -> None:
        """End all that is watched now, and the guardian with it; safe in a signal handler."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)
        self._process.wait()

    def _say(self, line: str) -> None:
        # A guardian that someone killed is no reason to stop serving.
        with suppress(BrokenPipeError):
            if self._pipe is not None:
                os.write(self._pipe, line.encode())
