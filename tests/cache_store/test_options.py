from pathlib import Path
from typing import Any

import pytest

from cache_store.options import StoreOptions

URL = "redis://user:hunter2@host:6379/0"


def test_what_sglang_reads_is_ignored_and_defaults_hold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LONGHAUL_STORE_URL", raising=False)
    options = StoreOptions.parse(
        {"backend_name": "longhaul", "module_path": "m", "class_name": "c", "interface_v1": 1, "url": URL}
    )
    assert (options.timeout_s, options.ttl, options.connections) == (2.0, "24h", 4)
    assert (options.state_keep_every, options.superseded_ttl_s, options.tenant_max_bytes) == (
        36_864,
        60.0,
        None,
    )
    assert options.state_dtype == "exact"


def test_what_is_given_holds():
    options = StoreOptions.parse({"url": URL, "ttl": "5m", "state_dtype": "bfloat16", "model_path": "/m"})
    assert (options.ttl, options.state_dtype, options.model_path) == ("5m", "bfloat16", Path("/m"))


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGHAUL_STORE_URL", "unix:///run/blobs.sock")
    assert StoreOptions.parse({}).url == "unix:///run/blobs.sock"
    monkeypatch.delenv("LONGHAUL_STORE_URL")
    with pytest.raises(ValueError, match="LONGHAUL_STORE_URL"):
        StoreOptions.parse({})


@pytest.mark.parametrize(
    "extra",
    [
        {"url": "http://user:hunter2@host"},
        {"url": 7},
        {"timeout_s": 0},
        {"timeout_s": "fast"},
        {"ttl": "2h"},
        {"superseded_ttl_s": 0},
        {"state_keep_every": 0},
        {"state_dtype": "float16"},
        {"tenant_max_bytes": 0},
        {"connections": 0},
        {"retry_bytes": -1},
        {"breaker_failures": 0},
        {"breaker_cooldown_s": 31},
        {"drain_s": 11},
        {"timeout": 2},
    ],
)
def test_an_impossible_setting_is_named_and_no_password_shown(extra: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(extra))) as error:
        StoreOptions.parse({"url": URL, **extra})
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in repr(StoreOptions.parse({"url": URL}))


def test_the_environment_gives_what_the_extra_config_leaves_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LONGHAUL_STORE_OPTIONS", '{"ttl": "1h", "state_dtype": "bfloat16"}')
    options = StoreOptions.parse({"url": URL, "ttl": "5m"})
    assert (options.ttl, options.state_dtype) == ("5m", "bfloat16")
    for broken in ("{", "[]", '{"bogus": 1}'):
        monkeypatch.setenv("LONGHAUL_STORE_OPTIONS", broken)
        with pytest.raises(ValueError, match="LONGHAUL_STORE_OPTIONS"):
            StoreOptions.parse({"url": URL})
