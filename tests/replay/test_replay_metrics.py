import pytest

from replay.metrics import Counters

PAGE = """
# HELP sglang:cached_tokens Number of cached prompt tokens.
# TYPE sglang:cached_tokens counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 20.0
sglang:cached_tokens_total{cache_source="device",model_name="n"} 3.0
sglang:cached_tokens_total{cache_source="total",model_name="m"} 123.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 2.0
"""
DRAFTS = """
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{is_streaming="true"} 90.0
sglang:generation_tokens_total{is_streaming="false"} 10.0
# TYPE sglang:spec_verify_calls counter
sglang:spec_verify_calls_total{model_name="m"} 40.0
"""


def test_sums_the_tiers():
    assert Counters.of(PAGE) == Counters({"device": 103, "host": 20, "storage": 0})


def test_other_servers_have_none():
    assert Counters.of("# TYPE x gauge\nx 1\n") == Counters()


def test_what_is_no_metrics_page():
    with pytest.raises(ValueError):
        Counters.of("<html>not found</html>")


def test_what_a_run_added_is_the_difference():
    before, after = Counters({"device": 3, "host": 0, "storage": 0}, 60, 20), Counters.of(PAGE + DRAFTS)
    assert after.since(before) == Counters({"device": 100, "host": 20, "storage": 0}, 40, 20)
    assert after.since(before).accept_length == 2.0
    # Tiers that appear only later would count what was there before.
    assert after.since(Counters()).cached_tokens == {}


def test_without_speculation_there_is_no_accept_length():
    assert Counters.of(PAGE).accept_length is None
