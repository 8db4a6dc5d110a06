import json
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis_process import RedisProcess

from cache_store.roots import RECORD_BYTES, Root, RootRegistry, root_key, root_page

ROOT = Root("acme", "1h", 10**12)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True),
    st.sampled_from([None, "5m", "1h", "24h"]),
    st.none() | st.integers(1, 2**63),
)
def test_a_record_is_read_as_it_was_written(tenant: str, ttl, max_bytes: int | None):
    root = Root(tenant, ttl, max_bytes)
    assert len(root.encode()) == RECORD_BYTES
    assert Root.decode(root.encode()) == root


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff",
        b"[]",
        b"{",
        b'{"tenant":"a","ttl":null}',
        b'{"tenant":"a:b","ttl":null,"max_bytes":null}',
        b'{"tenant":"a","ttl":"2h","max_bytes":null}',
        b'{"tenant":"a","ttl":null,"max_bytes":0}',
        b'{"tenant":"a","ttl":null,"max_bytes":1.5}',
        b'{"tenant":"a","ttl":null,"max_bytes":1,"more":1}',
        b'{"tenant":7,"ttl":null,"max_bytes":1}',
    ],
)
def test_what_is_no_record_is_refused(record: bytes):
    with pytest.raises(ValueError):
        Root.decode(record)


def test_the_first_page_is_named_as_sglang_names_it():
    """Taken from SGLang 0.5.23: `get_storage_hash_str(RadixKey(ids, cache_salt=...), page_size=64)[0]`."""
    ids = list(range(1000, 1128))
    assert root_page(ids, None, 64) == "5202e60f6130ac4d1a719da4699af7be8be6db2720efe114f00388ae4df4ba1f"
    assert root_page(ids[:63], None, 64) is None
    assert root_page(ids[:64], "x", 64) != root_page(ids, None, 64) == root_page(ids[:64], "", 64)


async def test_what_was_announced_is_there(redis_process: RedisProcess):
    now = 0.0
    registry = RootRegistry(redis_process.unix_url, clock=lambda: now)
    ids, server = list(range(64)), redis_process.client()
    page = root_page(ids, "salt", 64)
    assert page is not None
    assert await registry.announce(ids, "salt", ROOT)
    assert Root.decode(server.get(root_key(page))) == ROOT
    assert server.pttl(root_key(page)) > 86_400_000
    server.flushall()
    # The same again is not said again, another thing is; and the same after a minute.
    assert await registry.announce(ids, "salt", ROOT) and not server.exists(root_key(page))
    assert await registry.announce(ids, "salt", Root("acme", "5m"))
    assert json.loads(server.get(root_key(page)))["ttl"] == "5m"
    assert await registry.announce(ids, "salt", ROOT) and server.unlink(root_key(page))
    now = 61.0
    assert await registry.announce(ids, "salt", ROOT) and server.exists(root_key(page))
    assert await registry.announce(ids[:10], "salt", ROOT)
    await registry.aclose()


async def test_a_dead_server_delays_one_request_in_a_while(redis_process: RedisProcess):
    now = 0.0
    registry = RootRegistry(f"{redis_process.unix_url},{redis_process.tcp_url}", clock=lambda: now)
    ids = list(range(64))
    assert await registry.announce(ids, None, ROOT)
    redis_process.signal(signal.SIGSTOP)
    spent: list[float] = []
    for shift in range(1, 5):
        started = time.perf_counter()
        assert not await registry.announce([i + shift for i in ids], None, ROOT)
        spent.append(time.perf_counter() - started)
    assert 0.15 < spent[0] < 1 and max(spent[1:]) < 0.1
    redis_process.signal(signal.SIGCONT)
    assert not await registry.announce([7, *ids], None, ROOT)
    now = 6.0
    assert await registry.announce([7, *ids], None, ROOT)
    await registry.aclose()
