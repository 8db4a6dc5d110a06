import pytest

from replay.client import Answer
from replay.layout import PlannedRequest
from replay.record import Record
from replay.render import document, request_rows
from replay.report import distribution, make_report, summarize
from replay.usage import Usage, parse_tiers, parse_usage


def record(
    session="a",
    turn=0,
    *,
    sent=0.0,
    late=0.0,
    requested=100,
    seen=100,
    output=11,
    prefix=0,
    cached=0,
    tiers=None,
    ttft=1.0,
    total=3.0,
    failure=None,
):
    planned = PlannedRequest((), requested, requested, output, prefix)
    answer = None
    if failure is None:
        usage = Usage(seen, output, cached)
        answer = Answer(sent, sent + ttft, sent + total, usage, tiers or {})
    return Record(session, "root", turn, planned, sent - late, sent, answer, failure)


def test_percentiles_interpolate_between_ranks():
    values = distribution([4.0, 1.0, 3.0, 2.0])
    assert values is not None
    assert (values.p50, values.p90, values.p99, values.most) == pytest.approx((2.5, 3.7, 3.97, 4.0))
    assert distribution([]) is None


def test_hits_are_weighted_by_tokens_over_the_answered_requests():
    summary = summarize(
        "a",
        [
            record(requested=100, seen=104, prefix=0, cached=0),
            record(requested=300, seen=296, prefix=96, cached=64),
            record(requested=1000, prefix=900, failure="timeout"),
        ],
    )
    assert (summary.turns, summary.errors) == (3, 1)
    assert (summary.input_requested, summary.input_seen, summary.largest_input_error) == (400, 400, 4)
    assert (summary.prefix_tokens, summary.cached_tokens) == (96, 64)
    assert summary.actual_hit == 64 / 400
    assert summary.theoretical_hit == 96 / 400
    assert summary.hit_ratio == pytest.approx(2 / 3)


def test_latencies():
    summary = summarize("a", [record(ttft=1.0, total=3.0), record(ttft=2.0, total=2.0, output=1)])
    assert summary.ttft and summary.itl and summary.end_to_end
    assert summary.ttft.p50 == 1.5
    assert summary.itl.p50 == pytest.approx(
        0.2
    )  # 2 s for the 10 tokens after the first; one token has no gap
    assert summary.end_to_end.most == 3.0


def test_unknown_caches_stay_unknown():
    summary = summarize("a", [record(cached=10), record(cached=None)])
    assert summary.cached_tokens is None and summary.actual_hit is None and summary.hit_ratio is None
    nothing = summarize("a", [])
    assert (nothing.actual_hit, nothing.theoretical_hit, nothing.ttft) == (None, None, None)
    assert summarize("a", [record(cached=5, prefix=0)]).hit_ratio is None


def test_tiers_are_summed_when_all_answers_have_them():
    tiers = {"device": 3, "host": 2, "storage": 1}
    assert summarize("a", [record(tiers=tiers), record(tiers=tiers)]).tiers == {
        "device": 6,
        "host": 4,
        "storage": 2,
    }
    assert summarize("a", [record(tiers=tiers), record()]).tiers is None


def test_the_report_groups_sessions_and_counts_failures():
    report = make_report(
        [
            record("b", sent=5.0, late=0.5, total=2.0),
            record("a", sent=1.0, late=0.1),
            record("a", turn=1, sent=9.0, failure="http 503"),
        ]
    )
    assert [summary.name for summary in report.sessions] == ["a", "b"]
    assert report.total.turns == 3 and report.failures == {"http 503": 1}
    assert report.error_rate == pytest.approx(1 / 3)
    assert report.wall_s == pytest.approx(6.0)
    assert report.scheduling_error and report.scheduling_error.most == pytest.approx(0.5)
    whole = document(report, {"url": "u"})
    assert whole["total"]["turns"] == 3 and whole["url"] == "u"
    assert [row["sent_s"] for row in request_rows([record(sent=3.0), record(sent=1.0)])] == [0.0, 2.0]


def test_an_empty_report():
    report = make_report([])
    assert report.error_rate == 0 and report.sessions == () and report.scheduling_error is None


def test_usage_in_every_shape():
    openai = {
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "prompt_tokens_details": {
                "cached_tokens": 6,
                "cached_tokens_details": {"device": 4, "host": 2},
            },
        }
    }
    assert parse_usage(openai) == Usage(9, 2, 6)
    assert parse_tiers(openai) == {"device": 4, "host": 2, "storage": 0}
    sglang = {"sglext": {"cached_tokens_details": {"device": 1, "storage": 5, "storage_backend": "x"}}}
    assert parse_tiers(sglang) == {"device": 1, "host": 0, "storage": 5}
    assert parse_usage({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}) == Usage(9, 0, None)
    assert parse_usage({"usage": None}) is None and parse_usage({}) is None and parse_tiers({}) == {}
