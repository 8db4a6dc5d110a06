import json
import subprocess
import sys

import pytest

from bench import store


@pytest.mark.slow
def test_it_measures_every_way_over_both_transports():
    run = subprocess.run(
        [sys.executable, "-m", "bench.store", "--json", "--rounds", "1", "--sizes", "1024"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    report = json.loads(run.stdout.splitlines()[-1])
    for field in ("get_vs_socket", "set_vs_socket", "set_vs_redis_py", "lookup_vs_redis_py"):
        assert report[field] > 0
    for transport in ("tcp", "unix"):
        for direction in ("get", "set"):
            ways = report["transports"][transport]["kib"]["1024"][direction]
            assert set(ways) == {"bare", "ours", "redis_py", "values"}
            assert all(way["gb_per_s"] > 0 for way in ways.values())


def test_the_summary_is_the_worst_case():
    def way(ours: float, bare: float, plain: float) -> dict[str, dict[str, float]]:
        return {"ours": {"gb_per_s": ours}, "bare": {"gb_per_s": bare}, "redis_py": {"gb_per_s": plain}}

    fast, slow = way(4.0, 4.0, 1.0), way(2.0, 4.0, 1.0)
    report = {
        "tcp": {
            "kib": {"64": {"get": way(0.1, 4.0, 4.0)}, "1024": {"get": fast, "set": fast}},
            "lookup": {"ours_ms": 2.0, "redis_py_ms": 10.0},
        },
        "unix": {
            "kib": {"4096": {"get": slow, "set": fast}},
            "lookup": {"ours_ms": 2.0, "redis_py_ms": 8.0},
        },
    }
    report["tcp"]["kib"]["1024"]["set"] = fast
    assert store.summary(report) == {
        "get_vs_socket": 0.5,
        "set_vs_socket": 1.0,
        "get_vs_redis_py": 2.0,
        "set_vs_redis_py": 4.0,
        "lookup_vs_redis_py": 4.0,
    }


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--sizes", "40000"]])
def test_bad_arguments_are_named(arguments: list[str]):
    run = subprocess.run(
        [sys.executable, "-m", "bench.store", *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert arguments[0] in run.stderr
