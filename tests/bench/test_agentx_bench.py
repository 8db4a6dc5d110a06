"""What is read from the files of AgentX's clients, and how turns are compared."""

import json

import pytest

from bench.agentx import ClientFailure, Served, compare, exported, main, replayed, theoretical_hit


def row(turn: int, start: int, *, phase: str = "profiling", depth: int = 0, error=None, **counts: int):
    about = {
        "conversation_id": "a",
        "turn_index": turn,
        "request_start_ns": start,
        "benchmark_phase": phase,
        "agent_depth": depth,
    }
    metrics = {name: {"value": value, "unit": "tokens"} for name, value in counts.items()}
    return {"metadata": about, "metrics": metrics, "error": error}


def test_measured_turns_of_the_root_are_read_and_the_first_run_counts(tmp_path):
    rows = [
        row(2, 50, usage_prompt_tokens=9, usage_completion_tokens=9),
        row(1, 5, phase="warmup", usage_prompt_tokens=1),
        row(2, 20, usage_prompt_tokens=100, usage_prompt_cache_read_tokens=64, usage_completion_tokens=8),
        row(3, 30, usage_prompt_tokens=120, usage_completion_tokens=8),
        row(4, 40, error={"type": "X"}),
        row(5, 40, depth=1, usage_prompt_tokens=7),
    ]
    path = tmp_path / "profile_export.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert exported(path) == {("a", 2): Served(100, 64, 8), ("a", 3): Served(120, 0, 8)}


def test_our_report_is_read_in_the_same_way(tmp_path):
    one = {
        "session": "a",
        "agent": "root",
        "turn": 2,
        "input_seen": 90,
        "cached_tokens": 64,
        "output_seen": 8,
    }
    rows = [
        {**one, "sent_s": 2.0, "input_seen": 91},
        {**one, "sent_s": 1.0},
        {**one, "agent": "agent_1", "sent_s": 0.0},
        {"session": "a", "agent": "root", "turn": 3, "sent_s": 3.0, "failure": "timeout"},
    ]
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"requests": rows}))
    assert replayed(path) == {("a", 2): Served(90, 64, 8)}


def test_only_what_both_measured_is_compared():
    theirs = {("a", 1): Served(100, 50, 8), ("a", 2): Served(110, 0, 8)}
    ours = {("a", 1): Served(90, 45, 8), ("b", 1): Served(1, 1, 1)}
    found = compare("x", theirs, ours, 0.6)
    assert (found.turns, found.common, found.prompt_tokens, found.ours_prompt_tokens) == (2, 1, 100, 90)
    assert found.largest_difference == 10 and found.hit_points == pytest.approx(0.0)
    with pytest.raises(ClientFailure, match="none is the same"):
        compare("x", theirs, {("b", 1): Served(1, 1, 1)}, None)


def test_the_theoretical_rate_is_a_share(tmp_path):
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps({"theoretical_prefix_cache_hit": {"unit": "%", "avg": 64.0}}))
    assert theoretical_hit(path) == 0.64
    path.write_text("{}")
    assert theoretical_hit(path) is None


def test_a_missing_trace_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "nowhere"), "--model", str(tmp_path)])
    assert ended.value.code == 2 and "no such file" in capsys.readouterr().err
