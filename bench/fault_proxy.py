"""A TCP proxy that spoils what passes: slow, cut, reset, swallowed, refused or with flipped bits.

It stands between a client and a real server, so what the client meets is what it would meet on a bad network.
The fault can be changed at any time and holds for all connections at once.
"""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

_BLOCK_BYTES = 64 * 1024
_CONNECT_LIMIT_S = 5.0
_POLL_MS = 50


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to traffic.

    Attributes:
        delay_s: what each block of replies waits.
        bytes_per_s: how much passes in each direction.
        cut_after: bytes of replies on one connection after which it is closed, counted from its first reply
            under this fault.
        reset: close with a reset rather than in order.
        blackhole: nothing passes, and nothing is closed; a connection that lost bytes stays mute for ever.
        refuse: new connections are closed at once.
        flip_replies: one bit is wrong in about so many bytes of replies.
        flip_requests: the same for requests.
        replace: text of replies that becomes another, of the same length.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after: int | None = None
    reset: bool = False
    blackhole: bool = False
    refuse: bool = False
    flip_replies: int | None = None
    flip_requests: int | None = None
    replace: tuple[bytes, bytes] | None = None

    def __post_init__(self) -> None:
        assert self.replace is None or len(self.replace[0]) == len(self.replace[1]), self.replace
        assert not self.reset or self.cut_after is not None or self.refuse, "what is to be reset, and when?"


@dataclass(slots=True, eq=False)
class _Link:
    client: socket.socket
    server: socket.socket
    fault: Fault | None = None
    passed: int = 0
    mute: bool = False

    def close(self, *, reset: bool) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                if reset:
                    # Lingering for no time at all: the kernel sends RST and forgets what is unsent.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    end.shutdown(socket.SHUT_RDWR)
            end.close()


class FaultProxy:
    """Listens on a port of its own and passes everything on to `upstream`, spoilt by the present fault."""

    def __init__(self, upstream: tuple[str, int], *, seed: int = 0) -> None:
        self._upstream = upstream
        self._fault: Fault | None = None
        self._random = random.Random(seed)
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self.touched = 0
        """Blocks and connections that a fault has changed, held up or taken away."""
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, fault: Fault | None) -> None:
        """Spoil traffic in this way from now on; None: in no way."""
        self._fault = fault

    def drop(self, *, reset: bool = False) -> None:
        """Close all connections now."""
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.close(reset=reset)

    def close(self) -> None:
        """Close everything."""
        # shutdown wakes the accept; close alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                fault = self._fault
                server = socket.socket()
                if fault is not None and fault.refuse:
                    self.touched += 1
                    _Link(client, server).close(reset=fault.reset)
                    continue
                server.settimeout(_CONNECT_LIMIT_S)
                link = _Link(client, server)
                try:
                    server.connect(self._upstream)
                except OSError:
                    link.close(reset=False)
                    continue
                server.settimeout(None)
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._links.add(link)
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(link, *ends), daemon=True).start()

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        readable = select.poll()
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed before it was looked at
            readable.register(source, select.POLLIN)
            while True:
                if not readable.poll(_POLL_MS):
                    # A socket that a thread waits on is not reset by closing it: so none waits for long.
                    if source.fileno() < 0:
                        break
                    continue
                block = source.recv(_BLOCK_BYTES)
                if not block:
                    break
                fault = self._fault
                if link.mute:
                    continue
                if fault is None:
                    sink.sendall(block)
                elif not self._spoil(link, fault, sink, block, is_reply):
                    break
        link.close(reset=False)
        with self._lock:
            self._links.discard(link)

    def _spoil(self, link: _Link, fault: Fault, sink: socket.socket, block: bytes, is_reply: bool) -> bool:
        """Pass a block on as the fault has it; False when the connection is at its end."""
        if fault.blackhole:
            self.touched += 1
            link.mute = True
            return True
        if fault.bytes_per_s is not None:
            self.touched += 1
            time.sleep(len(block) / fault.bytes_per_s)
        every = fault.flip_replies if is_reply else fault.flip_requests
        if every is not None:
            block = self._flip(block, every)
        if is_reply:
            if fault.delay_s:
                self.touched += 1
                time.sleep(fault.delay_s)
            if fault.replace is not None and fault.replace[0] in block:
                self.touched += 1
                block = block.replace(*fault.replace)
            if fault.cut_after is not None:
                if link.fault is not fault:
                    link.fault, link.passed = fault, 0
                link.passed += len(block)
                if link.passed > fault.cut_after:
                    self.touched += 1
                    sink.sendall(block[: len(block) - (link.passed - fault.cut_after)])
                    link.close(reset=fault.reset)
                    return False
        sink.sendall(block)
        return True

    def _flip(self, block: bytes, every: int) -> bytes:
        with self._lock:
            wrong = self._places(len(block), every)
            bits = [1 << self._random.randrange(8) for _ in wrong]
        if not wrong:
            return block
        self.touched += 1
        spoilt = bytearray(block)
        for at, bit in zip(wrong, bits, strict=True):
            spoilt[at] ^= bit
        return bytes(spoilt)

    def _places(self, length: int, every: int) -> list[int]:
        places: list[int] = []
        at = int(self._random.expovariate(1 / every))
        while at < length:
            places.append(at)
            at += 1 + int(self._random.expovariate(1 / every))
        return places
