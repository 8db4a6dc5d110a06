"""The computed bytes, and that a real server is left with the states that they count."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from bench import retention
from bench.retention import PAGE_TOKENS, Geometry, Outcome, Session, play
from cache_store.chain import Span, StoredPool
from cache_store.keeper import Keeper
from cache_store.options import StoreOptions
from cache_store.retention import Reason, StatePolicy
from cache_store.servers import RedisServer, Role
from cache_store.shards import Shards

KEEP_EVERY = StoreOptions.model_fields["state_keep_every"].default
GRIDS = {"chunk_tokens": 8192, "track_tokens": 256}


def played(session: Session, **changes: Any) -> Outcome:
    settings = {"superseded_ttl_s": 60.0, **GRIDS, **changes}
    return play(session, StatePolicy(KEEP_EVERY, PAGE_TOKENS), Geometry(), **settings)


def test_the_geometry_is_that_of_kimi_k3():
    assert (Geometry().token_bytes, Geometry().state_bytes) == (27_648, 434_110_464 + 15_261_696)
    config = {
        "text_config": {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_attn_config": {
                "kda_layers": [layer for layer in range(1, 93) if layer % 4],
                "full_attn_layers": [*range(4, 93, 4), 93],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        }
    }
    assert Geometry.of(config) == Geometry.of(config["text_config"]) == Geometry()
    with pytest.raises(ValueError, match="kv_lora_rank"):
        Geometry.of({"linear_attn_config": config["text_config"]["linear_attn_config"]})


def test_a_long_session_takes_at_most_half_more_than_its_pages_and_tail():
    for context in (142_000, 149_500):
        outcome = played(Session(context_tokens=context))
        assert outcome.ratio <= 1.5
        assert outcome.tail_only_bytes == context // 64 * 64 * 27_648 + 449_372_160
        assert outcome.states_written == 130
        assert outcome.file_backend_bytes > 13 * outcome.tail_only_bytes
        assert outcome.peak_bytes < 2 * outcome.tail_only_bytes


def test_a_fast_session_has_more_that_is_still_to_expire():
    slow, fast = (played(Session(turn_s=turn_s)) for turn_s in (120.0, 2.0))
    assert slow.stored_bytes == fast.stored_bytes
    # A turn stores two states, and supersedes two.
    assert slow.peak_bytes == slow.stored_bytes + 2 * Geometry().state_bytes
    assert fast.peak_bytes > 2 * fast.stored_bytes
    assert played(Session(turn_s=2.0), superseded_ttl_s=1.0).peak_bytes == slow.peak_bytes


def test_chunks_of_a_long_prompt_are_states_too():
    session = Session(turns=2, context_tokens=60_000, answer_tokens=400)
    assert session.states(0, **GRIDS) == [128, 256, 384, 462, 468]
    # From the last state on, which is at 29,952 tokens.
    assert session.states(1, **GRIDS) == [596, 724, 852, 931, 936]


def test_a_real_server_is_left_with_those_states(tmp_path: Path):
    session, now = Session(), 1_700_000_000.0
    outcome = played(session)
    with RedisServer(Role.BLOBS, tmp_path / "blobs", max_memory_bytes=1 << 28) as server:
        options = StoreOptions.parse({"url": server.url, "timeout_s": 20.0})
        values = Shards(options)
        keeper = Keeper(values, options, clock=lambda: now, timer=lambda: now)
        pages, states = StoredPool("kv", bytes(16), "", 16), StoredPool("mamba", bytes(16), "t0.1", 16)
        keeper.register(pages, page_tokens=PAGE_TOKENS)
        keeper.register(states)
        chain = [f"{at:064x}" for at in range(session.context_tokens // PAGE_TOKENS)]
        stored = 0
        for turn in range(session.turns):
            for position in session.states(turn, **GRIDS):
                tail = Span([chain[position - 1]], chain[: position - 1])
                values.put(
                    states.values(tail.keys), [[memoryview(bytes(16))]], "mamba", keeper.lives_ms(tail)
                )
                keeper.arrived(states, tail)
                new = Span(chain[stored:position], chain[:stored])
                payloads = [[memoryview(bytes(16))]] * len(new.keys)
                keeper.written(
                    pages, new, values.put(pages.values(new.keys), payloads, "kv", keeper.lives_ms(new))
                )
                stored = position
                now += 2
                while keeper.work():
                    pass
        client = redis.Redis.from_url(server.url)
        left = [client.pttl(key) for key in states.keys(chain)]
        keeper.close()
        values.close()
    kept = {at * PAGE_TOKENS for at, life_ms in enumerate(left, 1) if life_ms > 60_000}
    assert kept == set(outcome.kept)
    assert sum(life_ms > -2 for life_ms in left) == outcome.states_written, "nothing was lost but by time"
    assert list(outcome.kept.values()) == [*[Reason.SPACED] * 3, Reason.PRECEDING, Reason.TAIL]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["bench.retention", *words])
    status = retention.main()
    return status, capsys.readouterr().out


def test_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    status, out = run(capsys, monkeypatch, "--json")
    report = json.loads(out)
    assert status == 0 and report["ratio"] <= 1.5
    assert report["ratio"] == round(report["stored_bytes"] / report["tail_only_bytes"], 3)
    half = json.loads(run(capsys, monkeypatch, "--json", "--state-dtype", "bfloat16")[1])
    assert half["state_bytes"] == 434_110_464 // 2 + 15_261_696
    assert half["file_backend_bytes"] == report["file_backend_bytes"]
    assert "file backend" in run(capsys, monkeypatch)[1]
    assert run(capsys, monkeypatch, "--turns", "1000")[0] == 2
    (tmp_path / "config.json").write_text("{}")
    assert run(capsys, monkeypatch, "--config", str(tmp_path / "config.json"))[0] == 2
