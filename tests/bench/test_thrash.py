from dataclasses import replace
from pathlib import Path

import pytest

from bench.local_servers import local_gateway, running
from bench.stub_engine import StubEngine, digest_script, serving
from bench.thrash import ADMISSION, ADMISSION_OPTIONS, REDIS, SGLANG, Point, Workload, cell, conclude
from cache_store.servers import RedisServer, Role
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json


def found(way: str, ratio: float, turns_per_minute: float, live: int = 16, errors: int = 0) -> Point:
    return Point(
        way=way,
        live=live,
        sessions=16,
        turns=160,
        errors=errors,
        hit=ratio * 0.8,
        theoretical=0.8,
        hit_ratio=ratio,
        device=1,
        host=2,
        storage=3,
        total_s=9600 / turns_per_minute,
        turns_per_minute=turns_per_minute,
        ttft_p50_s=0.1,
        ttft_p90_s=0.2,
    )


def test_four_sessions_at_their_longest_fit_and_a_fifth_does_not():
    workload = Workload()
    longest = workload.context * 3 // 2 + workload.output
    assert workload.pool_tokens % 64 == 0
    assert 4 * longest <= workload.pool_tokens < 5 * longest
    assert str(workload.pool_tokens) in workload.pools


@pytest.mark.parametrize(
    ("ratio", "rate", "errors", "ok"),
    [(0.95, 30.0, 0, True), (0.89, 30.0, 0, False), (0.95, 19.9, 0, False), (0.95, 30.0, 1, False)],
)
def test_the_goals_are_of_admission_at_four_times_what_fits(ratio: float, rate: float, errors: int, ok: bool):
    points = [
        found(SGLANG, 0.1, 10.0),
        found(REDIS, 0.9, 25.0),
        found(ADMISSION, 0.5, 1.0, live=8),
        found(ADMISSION, ratio, rate, errors=errors),
    ]
    report = conclude(points, Workload())
    assert report["hit_at_4x"] == ratio
    assert report["throughput_vs_sglang_at_4x"] == pytest.approx(rate / 10, abs=0.01)
    assert (report["sglang_hit_at_4x"], report["redis_throughput_vs_sglang_at_4x"]) == (0.1, 2.5)
    assert report["ok"] is ok
    alone = conclude(points[:1], Workload())
    assert alone["hit_at_4x"] is None and alone["throughput_vs_sglang_at_4x"] is None and alone["ok"]


def test_a_cell_counts_what_it_sent(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(tokenizer_json())
    tokenizer = K3Tokenizer.load(model)
    workload = replace(Workload(), context=600, turns=2, gap_s=0.0)
    with (
        serving(StubEngine(tokenizer, digest_script(tokenizer, 30), chunk=30)) as engine,
        RedisServer(Role.LEDGER, tmp_path / "ledger") as ledger,
    ):
        service, url = local_gateway(engine, ledger.url, model, tmp_path, extra=ADMISSION_OPTIONS[ADMISSION])
        with running(service):
            point = cell(ADMISSION, 2, url, model, workload)
    assert (point.way, point.live, point.sessions, point.turns, point.errors) == (ADMISSION, 2, 8, 16, 0)
    # The stub caches nothing and says no sizes: nobody waits.
    assert (point.hit, point.waited, point.storage) == (0.0, 0, 0)
    assert 0.2 < point.theoretical < 0.3 and point.total_s > 0 and point.ttft_p50_s <= point.ttft_p90_s
