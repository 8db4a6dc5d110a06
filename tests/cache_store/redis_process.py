"""A real server that the tests may kill, stop and starve."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import redis

from cache_store.servers import find_binary


class RedisProcess:
    """A redis-server without persistence, on a unix socket and a TCP port of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "r.sock"
        self.port = _free_port()
        self.unix_url = f"unix://{self.path}"
        self.tcp_url = f"redis://127.0.0.1:{self.port}"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [
                *(find_binary(), "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--unixsocket", str(self.path), "--dir", str(self._directory)),
                *("--save", "", "--appendonly", "no", *options),
            ],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
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
        return redis.Redis(unix_socket_path=str(self.path), socket_timeout=5)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
