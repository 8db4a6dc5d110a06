"""The proxy does to traffic what it says, and nothing otherwise."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bench.fault_proxy import Fault, FaultProxy


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while block := connection.recv(1 << 16):
                connection.sendall(block)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as found:
        yield found


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connected(proxy) as found:
        yield found


def connected(proxy: FaultProxy) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", proxy.port))
    found.settimeout(5)
    return found


def echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    got = b""
    while len(got) < len(data):
        block = client.recv(1 << 16)
        if not block:
            break
        got += block
    return got


def test_without_a_fault_all_passes(proxy: FaultProxy, client: socket.socket):
    data = bytes(range(256)) * 4000
    threading.Thread(target=client.sendall, args=(data,), daemon=True).start()
    got = b""
    while len(got) < len(data):
        got += client.recv(1 << 16)
    assert got == data
    assert proxy.touched == 0


def test_flipped_bits(proxy: FaultProxy, client: socket.socket):
    data = bytes(50_000)
    for fault in (Fault(flip_replies=1000), Fault(flip_requests=1000)):
        proxy.set(fault)
        got = echoed(client, data)
        wrong = [byte for byte in got if byte]
        assert 20 < len(wrong) < 100
        assert all(byte.bit_count() == 1 for byte in wrong)
    proxy.set(None)
    assert echoed(client, data) == data


def test_delay_and_rate(proxy: FaultProxy, client: socket.socket):
    started = time.monotonic()
    proxy.set(Fault(delay_s=0.1))
    assert echoed(client, b"x") == b"x"
    proxy.set(Fault(bytes_per_s=100_000))
    assert echoed(client, bytes(10_000)) == bytes(10_000)
    assert 0.1 + 0.2 < time.monotonic() - started < 2


def test_a_connection_is_cut_after_so_many_bytes(proxy: FaultProxy, client: socket.socket):
    proxy.set(Fault(cut_after=1000))
    assert echoed(client, bytes(700)) == bytes(700)
    assert echoed(client, bytes(700)) == bytes(300)
    with connected(proxy) as other:
        assert echoed(other, bytes(5000)) == bytes(1000)


def test_a_reset_is_one(proxy: FaultProxy, client: socket.socket):
    proxy.set(Fault(cut_after=10, reset=True))
    client.sendall(bytes(1000))
    with pytest.raises(ConnectionResetError):
        while client.recv(1 << 16):
            pass


def test_what_a_blackhole_swallowed_never_comes(proxy: FaultProxy, client: socket.socket):
    proxy.set(Fault(blackhole=True))
    client.sendall(b"lost")
    time.sleep(0.1)
    proxy.set(None)
    client.sendall(b"late")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(10)
    with connected(proxy) as other:
        assert echoed(other, b"new") == b"new"


def test_refused_and_dropped_connections(proxy: FaultProxy, client: socket.socket):
    assert echoed(client, b"first") == b"first"
    proxy.set(Fault(refuse=True))
    with connected(proxy) as other:
        assert other.recv(10) == b""
    assert echoed(client, b"old") == b"old"
    proxy.drop()
    assert client.recv(10) == b""


def test_text_becomes_another(proxy: FaultProxy, client: socket.socket):
    proxy.set(Fault(replace=(b"7.2.1", b"5.0.9")))
    assert echoed(client, b"version:7.2.1.") == b"version:5.0.9."
