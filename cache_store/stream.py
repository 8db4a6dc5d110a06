"""Sockets to a server, over TCP, TLS and unix paths, whose every wait ends at a deadline.

WireError
  ConnectFailed      no connection within the deadline
  DeadlineExceeded   connected, but not answered in time
  ConnectionLost     closed or reset by the other side
  ProtocolFault      an answer that is not RESP, or not to what was asked
  ServerRefused      an error reply; `.code` is its first word (OOM, NOAUTH, LOADING, ...)
"""

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from redis.connection import parse_url

Buffer = bytes | bytearray | memoryview
Address = tuple[int, Any]
"""Address family and what `socket.connect` takes."""

DEFAULT_PORT = 6379
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
_TLS_JOIN_BYTES = 16 * 1024


class WireError(Exception):
    """The server could not be reached, did not answer in time, or answered with an error."""

    kind = "wire"


class ConnectFailed(WireError):
    """No connection within the deadline."""

    kind = "connect"


class DeadlineExceeded(WireError):
    """The server did not answer in time."""

    kind = "timeout"


class ConnectionLost(WireError):
    """The other side closed or reset the connection."""

    kind = "connection"


class ProtocolFault(WireError):
    """The answer is not RESP, or not an answer to what was asked."""

    kind = "protocol"


class ServerRefused(WireError):
    """The server answered with an error."""

    kind = "refused"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.split(" ", 1)[0]


class Deadline:
    """A point in time by which a call must have ended."""

    __slots__ = ("_at",)

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineExceeded: none are left.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline has passed")
        return left


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens and how to log in, from a URL.

    ``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS, ``unix://[user:password@]/path[?db=N]``.
    TLS takes redis-py's query parameters ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``.
    """

    url: str = field(repr=False)
    path: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert bool(self.path) != bool(self.host), "an endpoint is either a path or a host"

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Read a URL.

        Raises:
            ValueError: it is none of the three kinds, or its parts make no sense.
        """
        scheme = urlsplit(url).scheme
        if scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"store URL has scheme {scheme!r}: use redis://, rediss:// or unix://")
        try:
            parts: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise ValueError(f"store URL is not valid: {error}") from error
        if scheme == "unix" and not parts.get("path"):
            raise ValueError("store URL names no socket: use unix:///path/to/socket")
        return cls(
            url=url,
            path=parts.get("path", "") if scheme == "unix" else "",
            host="" if scheme == "unix" else parts.get("host") or "localhost",
            port=int(parts.get("port") or DEFAULT_PORT),
            database=int(parts.get("db") or 0),
            username=parts.get("username") or "",
            password=parts.get("password") or "",
            tls=_tls_context(parts) if scheme == "rediss" else None,
        )

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"


def _tls_context(parts: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=parts.get("ssl_ca_certs"))
    if certificate := parts.get("ssl_certfile"):
        context.load_cert_chain(certificate, parts.get("ssl_keyfile"))
    return context


class Stream(Protocol):
    """What a connection needs of a socket. Its waits end at the deadline, its errors are `WireError`."""

    def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Send all of the buffers, in order."""
        ...

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        """Receive what there is, at least one byte; returns how many."""
        ...

    def receive_all(self, view: memoryview, deadline: Deadline) -> None:
        """Fill the view."""
        ...

    def is_quiet(self) -> bool:
        """Whether nothing is to be read: an idle connection is readable only when closed or astray."""
        ...

    def close(self) -> None:
        """Close the socket, whatever is under way."""
        ...


class _PlainStream:
    """A blocking socket whose waits the kernel bounds."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        self._timeout_s = 0.0
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        # The kernel's own send timeout counts anew for every part on a unix socket: poll instead.
        pending = buffers
        while pending:
            try:
                sent = self._socket.sendmsg(pending, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._writable.poll(deadline.remaining() * 1000)
                continue
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            pending = _after(pending, sent)

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        return self._receive(view, 0, deadline)

    def receive_all(self, view: memoryview, deadline: Deadline) -> None:
        # With MSG_WAITALL one system call fills the buffer, and its timeout bounds the sum of its waits.
        while view:
            view = view[self._receive(view, socket.MSG_WAITALL, deadline) :]

    def _receive(self, view: memoryview, flags: int, deadline: Deadline) -> int:
        left = deadline.remaining()
        # Not for every value: a wait that ends a twentieth too late is near enough.
        if not left <= self._timeout_s <= 1.05 * left:
            self._timeout_s = left
            whole, part = divmod(left, 1)
            # A timeout of zero would mean none at all.
            timeout = struct.pack("ll", int(whole), max(1, int(part * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        try:
            count = self._socket.recv_into(view, 0, flags)
        except BlockingIOError:
            raise DeadlineExceeded("no answer within the deadline") from None
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if count == 0:
            raise ConnectionLost("closed by the server")
        return count

    def is_quiet(self) -> bool:
        return _is_quiet(self._socket)

    def close(self) -> None:
        self._socket.close()


class _TlsStream:
    """A TLS socket: no scatter and gather, no flags; Python bounds its waits."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock

    def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        with _tls_errors():
            for part in _joined(buffers):
                self._socket.settimeout(deadline.remaining())
                self._socket.sendall(part)

    def receive_some(self, view: memoryview, deadline: Deadline) -> int:
        with _tls_errors():
            self._socket.settimeout(deadline.remaining())
            count = self._socket.recv_into(view)
        if count == 0:
            raise ConnectionLost("closed by the server")
        return count

    def receive_all(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            view = view[self.receive_some(view, deadline) :]

    def is_quiet(self) -> bool:
        return self._socket.pending() == 0 and _is_quiet(self._socket)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def _tls_errors() -> Generator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded("no answer within the deadline") from None
    except OSError as error:
        raise ConnectionLost(str(error)) from error


def _is_quiet(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


def _after(buffers: Sequence[Buffer], sent: int) -> Sequence[Buffer]:
    """What is left of `buffers` after their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return ()


def _joined(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The buffers, small ones joined: each part becomes a TLS record of its own."""
    small = bytearray()
    for buffer in buffers:
        if len(buffer) <= _TLS_JOIN_BYTES:
            small += buffer
            continue
        if small:
            yield small
            small = bytearray()
        yield buffer
    if small:
        yield small


def connect(endpoint: Endpoint, addresses: Sequence[Address], deadline: Deadline) -> Stream:
    """Connect to the first of `addresses` that answers, or to the endpoint's path.

    Raises:
        ConnectFailed: none did by the deadline.
    """
    if endpoint.path:
        return _PlainStream(_dial(socket.AF_UNIX, endpoint.path, deadline))
    failure = ConnectFailed(f"{endpoint.host} has no known address")
    for family, address in addresses:
        try:
            sock = _dial(family, address, deadline)
        except ConnectFailed as error:
            failure = error
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.tls is None:
            return _PlainStream(sock)
        try:
            sock.settimeout(deadline.remaining())
            return _TlsStream(endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host))
        except (OSError, DeadlineExceeded) as error:
            sock.close()
            raise ConnectFailed(f"{endpoint}: {error}") from error
    raise failure


def look_up(endpoint: Endpoint) -> list[Address]:
    """The addresses of the endpoint's host, which may take as long as the resolver likes.

    Raises:
        ConnectFailed: it has none.
    """
    if not endpoint.host:
        return []
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectFailed(f"{endpoint.host}: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


def _dial(family: int, address: Any, deadline: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Before connecting, for the window that TCP announces depends on it.
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.settimeout(deadline.remaining())
        sock.connect(address)
    except (OSError, DeadlineExceeded) as error:
        sock.close()
        raise ConnectFailed(f"{address}: {error}") from error
    return sock
