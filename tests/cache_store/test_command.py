"""`longhaul store` on a real server."""

import io
import json
import sys
from typing import Any

import pytest
from redis_process import RedisProcess

from cache_store.chain import Span, StoredPool
from cache_store.format import CHUNK_BYTES
from cache_store.keeper import Keeper
from cache_store.options import StoreOptions
from cache_store.roots import Root, root_key
from cache_store.shards import Shards
from service.cli import main

SPACE = bytes(range(16))
KV = StoredPool("kv", SPACE, "", 100)
STATES = StoredPool("mamba", SPACE, "t0.2", 2 * CHUNK_BYTES)
RECORD = 100 + 80


@pytest.fixture
def url(redis_process: RedisProcess) -> str:
    """A store in which acme has 5 pages and a state, and nobody in particular 3 pages."""
    options = StoreOptions.parse({"url": redis_process.unix_url, "timeout_s": 5.0, "drain_s": 0})
    values = Shards(options)
    keeper = Keeper(values, options)
    keeper.register(KV, page_tokens=64)
    keeper.register(STATES)
    redis_process.client().set(root_key("a0"), Root("acme").encode())
    for name, count in (("a", 5), ("b", 3)):
        span = Span([f"{name}{i}" for i in range(count)], [])
        payloads = [[memoryview(bytes(100))]] * count
        keeper.written(KV, span, values.put(KV.values(span.keys), payloads, "kv", keeper.lives_ms(span)))
    state = Span(["a4"], ["a0", "a1", "a2", "a3"])
    values.put(STATES.values(state.keys), [[memoryview(bytes(STATES.length))]], "mamba", 50_000)
    keeper.arrived(STATES, state)
    keeper.close()
    values.close()
    redis_process.client().set("another", "program")
    return redis_process.unix_url


def store(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["store", *words, "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


def test_stats_count_values_and_bytes(url: str, capsys: pytest.CaptureFixture[str]):
    status, found = store(capsys, "stats", "--url", url)
    state_bytes = 2 * CHUNK_BYTES + 2 * 80 + 80 + 2 * 16
    assert status == 0
    assert (found["values"], found["bytes"]) == (9, 8 * RECORD + state_bytes)
    assert found["tenants"] == {
        "-": {"values": 3, "bytes": 3 * RECORD},
        "acme": {"values": 6, "bytes": 5 * RECORD + state_bytes},
    }
    space = SPACE[:8].hex()
    assert found["pools"] == [
        {"namespace": space, "pool": "kv", "tenant": "-", "values": 3, "bytes": 3 * RECORD},
        {"namespace": space, "pool": "kv", "tenant": "acme", "values": 5, "bytes": 5 * RECORD},
        {"namespace": space, "pool": "mamba", "tenant": "acme", "values": 1, "bytes": state_bytes},
    ]
    (server,) = found["servers"]
    assert server["used_bytes"] > state_bytes and server["keys"] > 9


def test_the_list_begins_with_what_expires_first(url: str, capsys: pytest.CaptureFixture[str]):
    _, found = store(capsys, "list", "--url", url)
    assert found["found"] == 9
    assert found["values"][0]["pool"] == "mamba" and 40 < found["values"][0]["expires_s"] <= 50
    assert found["values"][0]["page"] == "a4:t0.2"
    _, found = store(capsys, "list", "--url", url, "--tenant", "acme", "--pool", "kv", "--limit", "2")
    assert (found["found"], [value["page"] for value in found["values"]]) == (5, ["a4", "a3"])


def test_clearing_takes_one_tenants_values(
    url: str, capsys: pytest.CaptureFixture[str], redis_process: RedisProcess
):
    status, found = store(capsys, "clear", "--url", url, "--tenant", "acme", "--yes")
    assert (status, found["removed_values"]) == (0, 6)
    server = redis_process.client()
    assert sorted(key.split(b":")[3] for key in server.keys("*:kv:*")) == [b"b0", b"b1", b"b2"]
    assert not server.keys("*:mamba:*") and not server.keys("*:acme")
    assert store(capsys, "clear", "--url", url, "--tenant", "acme", "--yes")[1]["removed_values"] == 0
    assert store(capsys, "clear", "--url", url, "--all", "--yes")[1]["removed_values"] == 3
    assert server.keys() == [b"another"]


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("\n", 9), ("no\n", 9)])
def test_clearing_asks(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str, left: int
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert main(["store", "clear", "--all", "--url", url]) == 1, "nobody is there to be asked"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["store", "clear", "--all", "--url", url]) == (0 if left == 0 else 1)
    capsys.readouterr()
    assert store(capsys, "stats", "--url", url)[1]["values"] == left


def test_tables_are_for_people(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["store", "stats", "--url", url]) == 0
    assert main(["store", "list", "--url", url, "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert "acme" in shown.out and "8.38 MB" in shown.out
    assert "1 of 9" in shown.err


def test_a_server_that_is_not_there_and_a_url_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    assert main(["store", "stats", "--url", "http://x"]) == 2
    assert "--url" in capsys.readouterr().err
    monkeypatch.delenv("LONGHAUL_STORE_URL", raising=False)
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path))
    assert main(["store", "stats"]) == 1
    assert "is it running" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["store", "--help"])
    assert "longhaul store clear --tenant acme" in capsys.readouterr().out
