import os
import random
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from redis_process import RedisProcess
from scripted_server import answer, serving

from cache_store.resp import Status
from cache_store.stream import (
    ConnectFailed,
    ConnectionLost,
    Deadline,
    DeadlineExceeded,
    Endpoint,
    ProtocolFault,
    ServerRefused,
    WireError,
)
from cache_store.wire import BlobClient

TTL_MS = 60_000


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, redis_process: RedisProcess):
    blobs = BlobClient(redis_process.unix_url if request.param == "unix" else redis_process.tcp_url)
    yield blobs
    blobs.close()


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_values_of_all_sizes_come_back(client: BlobClient):
    rng = random.Random(1)
    sizes = [1, 2, 79, 80, 255, 256, 257, 4095, 65_535, 65_536, 300_001, 4 << 20, 9 << 20]
    values = {b"key%d" % size: rng.randbytes(size) for size in sizes}
    with client.connection(Deadline(20)) as connection:
        assert connection.write([(k, [v]) for k, v in values.items()], TTL_MS) == [None] * len(sizes)
        assert connection.lengths(list(values)) == sizes
    # Cut unevenly, empty parts included.
    targets = [views(size // 3, 0, size - size // 3, 0) for size in sizes]
    with client.connection(Deadline(20)) as connection:
        assert list(connection.read(list(values), targets)) == [Status.READ] * len(sizes)
    assert [b"".join(target) for target in targets] == list(values.values())


def test_a_value_may_have_more_buffers_than_one_system_call_takes(client: BlobClient):
    parts = [bytes([index % 251]) * 7 for index in range(3000)]
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"key", parts), (b"next", [b"after"])], TTL_MS)
        target, after = views(21_000), views(5)
        assert list(connection.read([b"key", b"next"], [target, after])) == [Status.READ] * 2
    assert bytes(target[0]) == b"".join(parts)
    assert bytes(after[0]) == b"after"


def test_what_is_missing_or_does_not_fit_leaves_the_target_alone(
    client: BlobClient, redis_process: RedisProcess
):
    redis_process.client().rpush("list", "x")
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"short", [b"123"]), (b"long", [b"1" * 300_000]), (b"ok", [b"1234"])], TTL_MS)
        keys = [b"none", b"short", b"long", b"list", b"ok"]
        targets = [views(4) for _ in keys]
        statuses = list(connection.read(keys, targets))
        assert connection.lengths(keys) == [0, 3, 300_000, -1, 4]
    assert statuses == [Status.MISSING, Status.MISFIT, Status.MISFIT, Status.MISFIT, Status.READ]
    assert [bytes(target[0]) for target in targets] == [bytes(4)] * 4 + [b"1234"]


def test_expire_and_unlink(client: BlobClient, redis_process: RedisProcess):
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"a", [b"1"]), (b"b", [b"2"])], 5_000)
        assert connection.expire([b"a", b"none"], 100_000) == [1, 0]
        assert connection.unlink([b"b", b"none"]) == [1, 0]
        assert connection.lengths([]) == []
    assert 5_000 < redis_process.client().pttl("a") <= 100_000
    assert not redis_process.client().exists("b")


def test_connections_are_reused(client: BlobClient, redis_process: RedisProcess):
    for _ in range(20):
        with client.connection(Deadline(20)) as connection:
            connection.lengths([b"a"])
    assert redis_process.client().info("stats")["total_connections_received"] < 10


def test_threads_share_a_client(client: BlobClient):
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for turn in range(30):
            keys = [b"%d:%d:%d" % (seed, turn, i) for i in range(5)]
            values = [rng.randbytes(rng.randrange(1, 50_000)) for _ in keys]
            targets = [views(len(value)) for value in values]
            with client.connection(Deadline(60)) as connection:
                connection.write([(k, [v]) for k, v in zip(keys, values, strict=True)], TTL_MS)
                statuses = list(connection.read(keys, targets))
            if statuses != [Status.READ] * 5 or [bytes(t[0]) for t in targets] != values:
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_stopped_server_costs_the_deadline_and_no_more(client: BlobClient, redis_process: RedisProcess):
    big = [(b"k%d" % i, [os.urandom(1 << 20)]) for i in range(40)]
    with client.connection(Deadline(20)) as connection:
        connection.lengths([b"a"])
    redis_process.signal(signal.SIGSTOP)
    for call in ("lengths", "read", "write"):
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded), client.connection(Deadline(0.3)) as connection:
            if call == "lengths":
                connection.lengths([b"a"])
            elif call == "read":
                list(connection.read([b"a"], [views(10)]))
            else:
                connection.write(big, TTL_MS)
        assert 0.25 < time.monotonic() - started < 1.5
    redis_process.signal(signal.SIGCONT)
    with client.connection(Deadline(20)) as connection:
        connection.ping()


def test_a_late_reply_is_never_taken_for_another_keys(client: BlobClient, redis_process: RedisProcess):
    """A is asked, the server stalls, the deadline passes; then B and A are asked: each must get its own."""
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"A", [b"a" * 1000]), (b"B", [b"b" * 1000])], TTL_MS)
    for _ in range(5):
        redis_process.signal(signal.SIGSTOP)
        target = views(1000)
        with pytest.raises(DeadlineExceeded), client.connection(Deadline(0.1)) as connection:
            list(connection.read([b"A"], [target]))
        redis_process.signal(signal.SIGCONT)
        for key, expected in ((b"B", b"b" * 1000), (b"A", b"a" * 1000)):
            with client.connection(Deadline(20)) as connection:
                assert list(connection.read([key], [target])) == [Status.READ]
            assert bytes(target[0]) == expected


def test_an_abandoned_read_costs_the_connection(client: BlobClient):
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"A", [b"a" * 1000]), (b"B", [b"b" * 1000])], TTL_MS)
    target = views(1000)
    with client.connection(Deadline(20)) as connection:
        next(connection.read([b"A", b"B"], [views(1000), views(1000)]))
    with client.connection(Deadline(20)) as other:
        assert other is not connection
        assert list(other.read([b"A"], [target])) == [Status.READ]
    assert bytes(target[0]) == b"a" * 1000


def test_a_killed_server_is_an_error_and_its_successor_is_found(
    client: BlobClient, redis_process: RedisProcess
):
    with client.connection(Deadline(20)) as connection:
        connection.ping()
    redis_process.kill()
    with pytest.raises(ConnectFailed), client.connection(Deadline(1)):
        pass
    redis_process.start()
    with client.connection(Deadline(20)) as connection:
        connection.ping()


def test_connections_that_the_server_closed_while_idle_are_not_used(
    client: BlobClient, redis_process: RedisProcess
):
    for _ in range(5):
        with client.connection(Deadline(20)) as connection:
            connection.ping()
        redis_process.client().client_kill_filter(_type="normal", skipme=True)
    with client.connection(Deadline(20)) as connection:
        connection.ping()


def test_refusals_are_reported_for_each_value(redis_process: RedisProcess):
    redis_process.kill()
    redis_process.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    client = BlobClient(redis_process.unix_url)
    with client.connection(Deadline(20)) as connection:
        outcomes = connection.write([(b"k%d" % i, [bytes(1 << 20)]) for i in range(6)], TTL_MS)
        stored = connection.lengths([b"k%d" % i for i in range(6)])
    assert [size == 1 << 20 for size in stored] == [outcome is None for outcome in outcomes]
    assert {outcome.code for outcome in outcomes if outcome} == {"OOM"}


def test_logging_in(redis_process: RedisProcess):
    redis_process.client().acl_setuser(
        "blobs", enabled=True, passwords=["+s%cret"], commands=["+@all"], keys=["*"]
    )
    redis_process.client().config_set("requirepass", "other")
    address = f"127.0.0.1:{redis_process.port}"
    client = BlobClient(f"redis://blobs:s%25cret@{address}/3")
    with client.connection(Deadline(20)) as connection:
        connection.write([(b"key", [b"x"])], TTL_MS)
    with BlobClient(f"redis://:other@{address}/3").connection(Deadline(20)) as connection:
        assert connection.lengths([b"key"]) == [1]
    with BlobClient(f"unix://:other@{redis_process.path}?db=3").connection(Deadline(20)) as connection:
        assert connection.lengths([b"key"]) == [1]
    with (
        pytest.raises(ServerRefused) as refused,
        BlobClient(f"redis://:no@{address}").connection(Deadline(20)),
    ):
        pass
    assert refused.value.code == "WRONGPASS"
    with (
        pytest.raises(ServerRefused) as refused,
        BlobClient(f"redis://{address}").connection(Deadline(20)) as connection,
    ):
        connection.lengths([b"key"])
    assert refused.value.code == "NOAUTH"


def test_the_version_is_told_to_those_who_may_ask(redis_process: RedisProcess):
    told = redis_process.client().info("server")["redis_version"]
    with BlobClient(redis_process.tcp_url).connection(Deadline(20)) as connection:
        assert connection.version() == tuple(map(int, told.split(".")))
        assert connection.is_clean
    redis_process.client().acl_setuser(
        "poor", enabled=True, passwords=["+x"], commands=["+ping", "+get"], keys=["*"]
    )
    url = f"redis://poor:x@127.0.0.1:{redis_process.port}"
    with BlobClient(url).connection(Deadline(20)) as connection:
        assert connection.version() is None
        assert list(connection.read([b"none"], [views(1)])) == [Status.MISSING]


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n",
        b"$5\r\nabcde\r\n",
        b":1\r\n:2\r\n",
        b":1\n",
        b"nonsense\r\n",
        b":1\r\n$",
        b":x\r\n",
        b":\r\n",
    ],
)
def test_what_is_no_integer_reply_is_a_fault(tmp_path: Path, reply: bytes):
    with serving(tmp_path / "s", answer(reply)) as server:
        client = BlobClient(server.url)
        with pytest.raises(ProtocolFault), client.connection(Deadline(5)) as connection:
            connection.lengths([b"key"])


@pytest.mark.parametrize(
    "reply",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$4\r\nabcdXX",
        b"*1\r\n$4\r\nabcd\r\n",
        b"$99999999999\r\n",
    ],
)
def test_what_is_no_value_reply_is_a_fault(tmp_path: Path, reply: bytes):
    with serving(tmp_path / "s", answer(reply)) as server:
        client = BlobClient(server.url)
        with pytest.raises(ProtocolFault), client.connection(Deadline(5)) as connection:
            list(connection.read([b"key"], [views(4)]))


def test_version_three_says_nothing_in_its_own_way(tmp_path: Path):
    with (
        serving(tmp_path / "s", answer(b"_\r\n$2\r\nab\r\n")) as server,
        BlobClient(server.url).connection(Deadline(5)) as connection,
    ):
        assert list(connection.read([b"a", b"b"], [views(2), views(2)])) == [Status.MISSING, Status.READ]


def test_a_reply_in_crumbs_is_put_together(tmp_path: Path):
    payload = os.urandom(1000)
    reply = b"$1000\r\n" + payload + b"\r\n$3\r\nxyz\r\n"

    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for at in range(0, len(reply), 13):
            connection.sendall(reply[at : at + 13])
            time.sleep(0.001)

    with serving(tmp_path / "s", script) as server:
        targets = [views(400, 600), views(3)]
        with BlobClient(server.url).connection(Deadline(10)) as connection:
            assert list(connection.read([b"a", b"b"], targets)) == [Status.READ] * 2
    assert b"".join(targets[0]) == payload


def test_a_trickle_does_not_stretch_the_deadline(tmp_path: Path):
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$100000\r\n")
        for _ in range(100):
            connection.sendall(b"x")
            time.sleep(0.05)

    with serving(tmp_path / "s", script) as server:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded), BlobClient(server.url).connection(Deadline(0.5)) as connection:
            list(connection.read([b"a"], [views(100_000)]))
        assert time.monotonic() - started < 1.5


def test_a_reader_that_dawdles_does_not_stretch_the_deadline(tmp_path: Path):
    def script(connection: socket.socket) -> None:
        for _ in range(100):
            connection.recv(4096)
            time.sleep(0.05)

    with serving(tmp_path / "s", script) as server:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded), BlobClient(server.url).connection(Deadline(0.5)) as connection:
            connection.write([(b"k%d" % i, [bytes(1 << 20)]) for i in range(64)], TTL_MS)
        assert time.monotonic() - started < 1.5


def test_a_reset_is_a_lost_connection(tmp_path: Path):
    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$100\r\nabc")
        connection.close()

    with serving(tmp_path / "s", script, script) as server:
        client = BlobClient(server.url)
        for _ in range(2):
            with pytest.raises(ConnectionLost), client.connection(Deadline(5)) as connection:
                list(connection.read([b"a"], [views(100)]))


def test_unasked_bytes_on_an_idle_connection_cost_it(tmp_path: Path):
    def astray(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b":1\r\n")
        time.sleep(0.05)
        connection.sendall(b":77\r\n")

    with serving(tmp_path / "s", astray, answer(b":2\r\n")) as server:
        client = BlobClient(server.url)
        with client.connection(Deadline(5)) as connection:
            assert connection.lengths([b"a"]) == [1]
        time.sleep(0.3)
        with client.connection(Deadline(5)) as connection:
            assert connection.lengths([b"a"]) == [2]
        assert server.accepted == 2


def test_a_closed_client_connects_no_more(client: BlobClient):
    with client.connection(Deadline(20)) as connection:
        connection.ping()
    client.close()
    with pytest.raises(ConnectFailed), client.connection(Deadline(20)):
        pass


def test_tls(tmp_path: Path, redis_process: RedisProcess):
    """The bundled server has no TLS: a relay in front of it has."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} "
        f"-out {certificate} -addext subjectAltName=DNS:localhost".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while block := source.recv(1 << 16):
                sink.sendall(block)
        except OSError:
            pass

    def relay() -> None:
        try:
            while True:
                outer = context.wrap_socket(listener.accept()[0], server_side=True)
                inner = socket.socket(socket.AF_UNIX)
                inner.connect(str(redis_process.path))
                for ends in ((outer, inner), (inner, outer)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()
        except OSError:
            pass

    threading.Thread(target=relay, daemon=True).start()
    port = listener.getsockname()[1]
    payload = os.urandom(3 << 20)
    try:
        client = BlobClient(f"rediss://localhost:{port}?ssl_ca_certs={certificate}")
        target = views(1 << 20, 2 << 20)
        with client.connection(Deadline(20)) as connection:
            assert connection.write([(b"key", [payload[:100], payload[100:]])], TTL_MS) == [None]
            assert list(connection.read([b"key"], [target])) == [Status.READ]
        assert b"".join(target) == payload
        redis_process.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(WireError), client.connection(Deadline(0.3)) as connection:
            connection.lengths([b"key"])
        assert time.monotonic() - started < 1.5
        with pytest.raises(ConnectFailed), BlobClient(f"rediss://localhost:{port}").connection(Deadline(5)):
            pass  # a certificate that nobody vouches for
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("http://host", "use redis://"),
        ("", "use redis://"),
        ("unix://", "names no socket"),
        ("redis://h:x", "valid"),
    ],
)
def test_bad_urls_say_why(url: str, remedy: str):
    with pytest.raises(ValueError, match=remedy):
        Endpoint.parse(url)


def test_an_endpoint_does_not_show_its_password():
    endpoint = Endpoint.parse("redis://user:hunter2@host:1234/2")
    assert "hunter2" not in f"{endpoint} {endpoint!r}"
    assert (endpoint.host, endpoint.port, endpoint.database) == ("host", 1234, 2)
    assert (endpoint.username, endpoint.password) == ("user", "hunter2")
