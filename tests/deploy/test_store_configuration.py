"""The configuration of the two stores in containers, given to a real server."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from subprocess import DEVNULL, Popen

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store.servers import CONFIGURATION, find_binary

DEPLOYED = Path(__file__).parents[2] / "deploy" / "redis"
# Where Compose mounts the files that `longhaul serve` uses too.
MOUNT = "/etc/longhaul/store"


@dataclass
class Server:
    """A running server, and a client that asks once."""

    process: Popen[bytes]
    client: "redis.Redis"
    socket: Path

    def end(self, signal: int = SIGTERM) -> None:
        self.client.close()
        self.process.send_signal(signal)
        self.process.wait(20)


@contextmanager
def serve(name: str, directory: Path, *options: str) -> Iterator[Server]:
    """The server of a configuration, moved from its container to a directory and a unix socket."""
    directory.mkdir(parents=True, exist_ok=True)
    text = (DEPLOYED / name).read_text()
    assert f"include {MOUNT}/{name}\n" in text
    moved = directory / "server.conf"
    moved.write_text(text.replace(MOUNT, str(CONFIGURATION)).replace("dir /data", f"dir {directory}"))
    socket = directory / "s"
    process = Popen(
        [find_binary(), moved, "--port", "0", "--unixsocket", socket, *options],
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    client = redis.Redis(unix_socket_path=str(socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))
    server = Server(process, client, socket)
    try:
        for _ in range(300):
            assert process.poll() is None, "the server refuses its configuration"
            with suppress(redis.RedisError):
                client.ping()
                break
            time.sleep(0.05)
        yield server
    finally:
        if process.poll() is None:
            server.end(SIGKILL)


def settings(server: Server) -> dict[str, str]:
    return server.client.config_get("*")


def test_blobs_are_evicted_and_never_written_to_disk(tmp_path: Path) -> None:
    with serve("blobs.conf", tmp_path, "--maxmemory", "16mb") as server:
        found = settings(server)
        assert found["maxmemory-policy"] == "allkeys-lru"
        assert (found["save"], found["appendonly"]) == ("", "no")
        assert {value for name, value in found.items() if name.startswith("lazyfree")} == {"yes"}
        assert found["protected-mode"] == "no"
        for number in range(32):
            server.client.set(f"page:{number}", bytes(1 << 20))
        assert server.client.exists("page:31") == 1
        assert int(server.client.info("stats")["evicted_keys"]) > 0
        server.end()
    assert {path.name for path in tmp_path.iterdir()} <= {"server.conf", "s"}


def test_the_ledger_outlives_the_death_of_its_server(tmp_path: Path) -> None:
    with serve("ledger.conf", tmp_path, "--maxmemory", "16mb", "--appendfsync", "always") as server:
        found = settings(server)
        assert found["maxmemory-policy"] == "noeviction"
        assert (found["appendonly"], found["appendfsync"], found["save"]) == ("yes", "always", "")
        server.client.set("turn", "told")
        server.end(SIGKILL)
    with serve("ledger.conf", tmp_path, "--maxmemory", "16mb") as server:
        assert settings(server)["appendfsync"] == "everysec"
        assert server.client.get("turn") == b"told"


def test_a_full_ledger_refuses_and_forgets_nothing(tmp_path: Path) -> None:
    with serve("ledger.conf", tmp_path, "--maxmemory", "8mb") as server:
        written = 0
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            for number in range(64):
                server.client.set(f"turn:{number}", bytes(1 << 20))
                written += 1
        assert 0 < written < 64
        assert server.client.exists(*(f"turn:{number}" for number in range(written))) == written


def test_a_backup_of_the_ledger_is_restored_as_the_readme_says(tmp_path: Path) -> None:
    readme = (DEPLOYED.parent / "README.md").read_text()
    for step in ("--rdb", "--appendonly no", "config set appendonly yes", "aof_rewrite_in_progress"):
        assert step in readme
    backup = tmp_path / "old" / "dump.rdb"
    with serve("ledger.conf", tmp_path / "old") as server:
        for number in range(100):
            server.client.rpush("turns", number)
        # What `valkey-cli --rdb` fetches; the bundled server comes without its client.
        server.client.save()
        assert backup.stat().st_size > 0
    new = tmp_path / "new"
    new.mkdir()
    backup.rename(new / "dump.rdb")
    with serve("ledger.conf", new, "--appendonly", "no") as server:
        assert server.client.llen("turns") == 100
        server.client.config_set("appendonly", "yes")
        while any(
            server.client.info("persistence")[name]
            for name in ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
        ):
            time.sleep(0.05)
        server.end()
    with serve("ledger.conf", new) as server:
        assert server.client.lrange("turns", 0, -1) == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("name", ["blobs.conf", "ledger.conf"])
def test_what_a_store_is_stands_in_one_place(name: str) -> None:
    def options(text: str) -> set[str]:
        return set(re.findall(r"^([a-z-]+) ", text, re.MULTILINE)) - {"include"}

    assert not options((DEPLOYED / name).read_text()) & options((CONFIGURATION / name).read_text())
