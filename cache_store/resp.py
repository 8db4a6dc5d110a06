"""The part of RESP that blobs need, over one connection; bytes go straight into the caller's memory.

https://redis.io/docs/latest/develop/reference/protocol-spec/, versions 2 and 3. Commands are pipelined; `GET`
replies are received into memoryviews and `SET` arguments sent from them, without a copy.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Enum

from cache_store.stream import (
    SOCKET_BUFFER_BYTES,
    Buffer,
    Deadline,
    Endpoint,
    ProtocolFault,
    ServerRefused,
    Stream,
)

# Enough replies under way to keep the server busy, without it holding much of them in its output buffer.
WINDOW_BYTES = 16 * 1024 * 1024
_SEND_BYTES = 4 * 1024 * 1024
_SEND_BUFFERS = 512  # below IOV_MAX, 1024
_LINES_BYTES = 64 * 1024
# Before a payload little is read ahead, for what is read ahead has to be copied.
_LINE_BYTES = 256
_DISCARD_MAX_BYTES = 64 * 1024 * 1024


class Status(Enum):
    """What became of one `GET`."""

    READ = "read"
    """the value has the expected length and is in the target"""
    MISSING = "missing"
    """the key does not exist"""
    MISFIT = "misfit"
    """the key holds a value of another length or type; the target is unchanged"""


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Connection:
    """One connection to a server, used by one thread at a time.

    Its methods raise `WireError`; after that it must not be used again, which `BlobClient` sees to.
    """

    def __init__(self, stream: Stream, deadline: Deadline) -> None:
        self._stream = stream
        self.deadline = deadline
        self._buffer = memoryview(bytearray(_LINES_BYTES))
        self._start = 0
        self._end = 0
        self._outstanding = 0

    @property
    def is_clean(self) -> bool:
        """Whether every reply has been read, and nothing beyond."""
        return self._outstanding == 0 and self._start == self._end

    @property
    def is_quiet(self) -> bool:
        """Whether the server has sent nothing unasked, a close included."""
        return self._stream.is_quiet()

    def close(self) -> None:
        """Close it, whatever is under way."""
        self._stream.close()

    def login(self, endpoint: Endpoint) -> None:
        """Authenticate and select the database."""
        commands: list[bytes] = []
        if endpoint.password:
            user = [endpoint.username.encode()] if endpoint.username else []
            commands.append(_command(b"AUTH", *user, endpoint.password.encode()))
        if endpoint.database:
            commands.append(_command(b"SELECT", b"%d" % endpoint.database))
        if commands:
            self._send(commands, len(commands))
            for _ in commands:
                self._simple()

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._send([_command(b"PING")], 1)
        self._simple()

    def version(self) -> tuple[int, ...] | None:
        """The version of Redis that the server is, or is compatible with; None if it does not say."""
        self._send([_command(b"INFO", b"server")], 1)
        line = self._line()
        if line.startswith(b"-"):  # not permitted, as a rule
            self._outstanding -= 1
            return None
        if not (line.startswith(b"$") and line[1:].isdigit() and int(line[1:]) <= _LINES_BYTES):
            raise ProtocolFault(f"expected text, got {line[:64]!r}")
        text = bytearray(int(line[1:]) + 2)
        self._into(memoryview(text))
        self._outstanding -= 1
        found = re.search(rb"^redis_version:(\d+(?:\.\d+)*)", text, re.MULTILINE)
        return tuple(map(int, found[1].split(b"."))) if found else None

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        """The length of the string under each key, in bytes; 0 where there is none, -1 for another type."""
        return self._integers([b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys])

    def expire(self, keys: Sequence[bytes], ttl_ms: int) -> list[int]:
        """Let each key live for another `ttl_ms`; 1 for each that exists."""
        ttl = b"%d" % ttl_ms
        return self._integers([_command(b"PEXPIRE", key, ttl) for key in keys])

    def integers(self, commands: Sequence[Sequence[bytes]]) -> list[int]:
        """The replies to commands that answer with an integer, such as `PTTL` or `SADD`, pipelined."""
        return self._integers([_command(*words) for words in commands])

    def unlink(self, keys: Sequence[bytes]) -> list[int]:
        """Remove each key; 1 for each that existed."""
        return self._integers([_command(b"UNLINK", key) for key in keys])

    def read(self, keys: Sequence[bytes], targets: Sequence[Sequence[memoryview]]) -> Iterator[Status]:
        """Get each key's value into its target, whose views together have the value's expected length.

        Yields each key's status in order, as its value arrives: the caller may check it while the next ones
        are under way. Abandoning the iterator leaves the connection unclean.
        """
        sizes = [sum(map(len, target)) for target in targets]
        asked = under_way = 0
        for index, target in enumerate(targets):
            commands: list[bytes] = []
            while asked < len(keys) and (asked == index or under_way + sizes[asked] <= WINDOW_BYTES):
                commands.append(_command(b"GET", keys[asked]))
                under_way += sizes[asked]
                asked += 1
            if commands:
                self._send([b"".join(commands)], len(commands))
            status = self._value(target, sizes[index])
            under_way -= sizes[index]
            yield status

    def write(
        self, items: Sequence[tuple[bytes, Sequence[Buffer]]], ttl_ms: int | Sequence[int]
    ) -> list[ServerRefused | None]:
        """Set each key to the concatenation of its buffers, to live for `ttl_ms` (for all, or of each).

        Returns for each key, in order, the error that the server answered with, or None.
        """
        lives = [ttl_ms] * len(items) if isinstance(ttl_ms, int) else ttl_ms
        pending: list[Buffer] = []
        pending_bytes = commands = 0
        for (key, buffers), life_ms in zip(items, lives, strict=True):
            size = sum(map(len, buffers))
            pending.append(b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, size))
            for buffer in buffers:
                pending.append(buffer)
                # One value may have more buffers than one system call takes.
                if len(pending) >= _SEND_BUFFERS:
                    self._send(pending, 0)
                    pending = []
            pending.append(b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(b"%d" % life_ms), life_ms))
            commands += 1
            pending_bytes += size
            if pending_bytes >= _SEND_BYTES:
                self._send(pending, commands)
                pending, pending_bytes, commands = [], 0, 0
        self._send(pending, commands)
        return [self._outcome() for _ in items]

    def _send(self, buffers: Sequence[Buffer], replies: int) -> None:
        self._outstanding += replies
        self._stream.send(buffers, self.deadline)

    def _integers(self, commands: list[bytes]) -> list[int]:
        if not commands:
            return []
        self._send([b"".join(commands)], len(commands))
        received = bytearray()
        missing = len(commands)
        while missing > 0:
            if self._start == self._end:
                self._fill(_LINES_BYTES)
            # Counted by their line feeds; what follows the last reply wanted would be an answer unasked.
            block = self._buffer[self._start : self._end]
            missing -= bytes(block).count(b"\n")
            received += block
            self._start = self._end
        text = bytes(received)
        if missing < 0 or not text.endswith(b"\r\n"):
            raise ProtocolFault("more or other replies than commands")
        self._outstanding -= len(commands)
        numbers = text[1:-2].split(b"\r\n:")
        if text.startswith(b":") and len(numbers) == len(commands) and all(map(bytes.isdigit, numbers)):
            return list(map(int, numbers))
        # Errors among them.
        return [self._integer(line) for line in text[:-2].split(b"\r\n")]

    def _integer(self, line: bytes) -> int:
        if line.startswith(b":") and line[1:].removeprefix(b"-").isdigit():
            return int(line[1:])
        if line.startswith(b"-WRONGTYPE"):
            return -1
        if line.startswith(b"-"):
            raise ServerRefused(line[1:].decode(errors="replace"))
        raise ProtocolFault(f"expected an integer, got {line[:64]!r}")

    def _simple(self) -> None:
        if refused := self._outcome():
            raise refused

    def _outcome(self) -> ServerRefused | None:
        line = self._line()
        self._outstanding -= 1
        if line.startswith(b"+"):
            return None
        if line.startswith(b"-"):
            return ServerRefused(line[1:].decode(errors="replace"))
        raise ProtocolFault(f"expected a status, got {line[:64]!r}")

    def _value(self, target: Sequence[memoryview], size: int) -> Status:
        line = self._line()
        if line in (b"$-1", b"_"):
            status = Status.MISSING
        elif line.startswith(b"-WRONGTYPE"):
            status = Status.MISFIT
        elif line.startswith(b"-"):
            raise ServerRefused(line[1:].decode(errors="replace"))
        elif line.startswith(b"$") and line[1:].isdigit():
            length = int(line[1:])
            status = Status.READ if length == size else Status.MISFIT
            if status is Status.READ:
                for view in target:
                    self._into(view)
            else:
                self._discard(length)
            end = bytearray(2)
            self._into(memoryview(end))
            if bytes(end) != b"\r\n":
                raise ProtocolFault(f"a value of {length} bytes does not end there")
        else:
            raise ProtocolFault(f"expected a value, got {line[:64]!r}")
        self._outstanding -= 1
        return status

    def _line(self) -> bytes:
        line = b""
        while True:
            if self._start == self._end:
                self._fill(_LINE_BYTES)
            block = self._buffer[self._start : self._end].tobytes()
            text, feed, _ = block.partition(b"\n")
            self._start += len(text) + len(feed)
            line += text
            if feed:
                if not line.endswith(b"\r"):
                    raise ProtocolFault("a line ends without a carriage return")
                return line[:-1]
            if len(line) > _LINES_BYTES:
                raise ProtocolFault("a reply's first line has no end")

    def _fill(self, limit: int) -> None:
        self._start = 0
        self._end = self._stream.receive_some(self._buffer[:limit], self.deadline)

    def _into(self, view: memoryview) -> None:
        buffered = min(len(view), self._end - self._start)
        view[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        rest = view[buffered:]
        if len(rest) > _LINE_BYTES:
            self._stream.receive_all(rest, self.deadline)
        elif rest:
            # A header or a line end: read a little ahead, so that the next line costs no call of its own.
            self._fill(_LINE_BYTES)
            self._into(rest)

    def _discard(self, length: int) -> None:
        if length > _DISCARD_MAX_BYTES:
            raise ProtocolFault(f"a value of {length} bytes where a smaller one was expected")
        scratch = memoryview(bytearray(min(length, SOCKET_BUFFER_BYTES)))
        while length:
            part = scratch[: min(length, len(scratch))]
            self._into(part)
            length -= len(part)
