"""A server that answers what a test tells it to, for what a real Redis never does."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Script = Callable[[socket.socket], None]


class ScriptedServer:
    """Runs one script per accepted connection, in order; connections beyond the scripts are closed."""

    def __init__(self, path: Path, *scripts: Script) -> None:
        self.url = f"unix://{path}"
        self.accepted = 0
        self.errors: list[BaseException] = []
        self._scripts = list(scripts)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                self._open.append(connection)
                if not self._scripts:
                    connection.close()
                    continue
                script = self._scripts.pop(0)
                threading.Thread(target=self._run, args=(script, connection), daemon=True).start()

    def _run(self, script: Script, connection: socket.socket) -> None:
        try:
            script(connection)
        except OSError as error:
            self.errors.append(error)

    def close(self) -> None:
        # shutdown wakes the accept; close alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


@contextlib.contextmanager
def serving(path: Path, *scripts: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(path, *scripts)
    try:
        yield server
    finally:
        server.close()


def answer(*replies: bytes) -> Script:
    """Answer each block of bytes received with the next reply, then keep the connection open."""

    def script(connection: socket.socket) -> None:
        for reply in replies:
            connection.recv(1 << 20)
            connection.sendall(reply)

    return script
