import pytest

from replay.metrics import cached_tokens_by_tier

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


def test_sums_the_tiers():
    assert cached_tokens_by_tier(PAGE) == {"device": 103, "host": 20, "storage": 0}


def test_other_servers_have_none():
    assert cached_tokens_by_tier("# TYPE x gauge\nx 1\n") == {}


def test_what_is_no_metrics_page():
    with pytest.raises(ValueError):
        cached_tokens_by_tier("<html>not found</html>")
