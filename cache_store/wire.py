"""A Redis client for large values: a pool of connections that are never reused after a fault.

Two rules make it safe. Every call has a deadline, which bounds connecting, sending and receiving together.
And a connection goes back into the pool only when every reply to what was sent on it has been read: after
an error, a timeout or an abandoned transfer it is closed, so no reply can be taken for another command's.
redis-py does everything that is not bulk.
"""

import contextlib
import threading
from collections.abc import Generator

from cache_store.resp import Connection
from cache_store.stream import Address, ConnectFailed, Deadline, Endpoint, connect, look_up


class BlobClient:
    """A pool of connections to one server. Thread-safe.

    Connections are made when they are needed and at most `idle` of them kept. Host names are looked up in
    `resolve`, never on the way of a call: a resolver has no deadline.
    """

    def __init__(self, url: str, *, idle: int = 4) -> None:
        self.endpoint = Endpoint.parse(url)
        self._idle_max = idle
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._addresses: list[Address] = []
        with contextlib.suppress(ConnectFailed):
            self.resolve()

    def resolve(self) -> None:
        """Look the host name up, which may take as long as the resolver likes.

        Raises:
            ConnectFailed: it has no address.
        """
        self._addresses = look_up(self.endpoint)

    @contextlib.contextmanager
    def connection(self, deadline: Deadline) -> Generator[Connection]:
        """A connection for a block of calls that ends by `deadline`.

        It is kept only if the block ended without an exception and left no reply unread.
        """
        connection = self._take(deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._put(connection)

    def close(self) -> None:
        """Close all idle connections, and those in use when they come back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def drop_idle(self) -> None:
        """Close all idle connections, as after a failure that may concern them all."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, deadline: Deadline) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectFailed("the client is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(deadline)
            if connection.is_quiet:
                connection.deadline = deadline
                return connection
            connection.close()

    def _put(self, connection: Connection) -> None:
        with self._lock:
            if connection.is_clean and not self._closed and len(self._idle) < self._idle_max:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, deadline: Deadline) -> Connection:
        connection = Connection(connect(self.endpoint, self._addresses, deadline), deadline)
        try:
            connection.login(self.endpoint)
        except BaseException:
            connection.close()
            raise
        return connection
