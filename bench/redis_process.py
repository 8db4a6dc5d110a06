"""A real Redis server that may be killed, stopped, starved and started again."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from cache_store.servers import KEPT_BLOCKS, find_binary

_START_LIMIT_S = 20.0


class RedisProcess:
    """A server without persistence, on a unix socket in `directory` and a TCP port of its own."""

    def __init__(self, directory: Path) -> None:
        """`directory` must be short: a socket's path has room for 107 bytes."""
        self.path = directory / "r.sock"
        self.port = _free_port()
        self.unix_url = f"unix://{self.path}"
        self.tcp_url = f"redis://127.0.0.1:{self.port}"
        self.data = directory / "data"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id; it must be running."""
        assert self._process is not None, "start() first"
        return self._process.pid

    def start(self, *options: str) -> None:
        """Start it, empty, and wait until it answers."""
        self.data.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [
                *(find_binary(), "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--unixsocket", str(self.path), "--dir", str(self.data)),
                *("--save", "", "--appendonly", "no", *options),
            ],
            env=os.environ | KEPT_BLOCKS,
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                self.client().ping()
                return
            except redis.ResponseError:
                return  # it answers, and wants a password
            except redis.RedisError:
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        """A client of its own, over the unix socket."""
        return redis.Redis(unix_socket_path=str(self.path), socket_timeout=5)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        assert self._process is not None, "start() first"
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, if it runs; all it held is lost."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
