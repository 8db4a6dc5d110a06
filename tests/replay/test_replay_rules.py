"""The rules of AgentX, against a real HTTP server."""

import asyncio
import json
import re
import time

import pytest
from stub_endpoint import StubEndpoint

from replay.report import make_report
from replay.rules import AGENTX, Rules, chosen, invalid_because
from replay.schedule import IdleCapClock
from service.cli import main


@pytest.fixture
def replay(capsys):
    def run(*arguments):
        capsys.readouterr()
        status = main(["replay", *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return status, json.loads(out.splitlines()[-1])

    return run


def lasting(seconds, endpoint, traces, *more):
    return (
        *(traces, "--url", endpoint.url, "--scenario", "agentx", "--duration", seconds),
        *("--scale", "1/8", "--time-scale", "0.0001", "--seed", 5, *more),
    )


def test_agentx_begins_in_the_middle_warm_and_goes_round(replay, endpoint, traces, tokenizer_dir):
    endpoint.token_s = 0.0001
    arguments = lasting(2.5, endpoint, traces, "--tokenizer", tokenizer_dir, "--concurrency", 2)
    status, found = replay(*arguments)
    assert status == 0 and found["measured_s"] == pytest.approx(2.5, abs=0.5)
    assert found["rules"]["start_window"] == [0.25, 0.75] and found["rules"]["recycle"]
    warm = found["warm_up_requests"]
    bodies = [body for body, _ in endpoint.requests]
    assert 2 <= warm <= 20
    assert all(body["max_completion_tokens"] == 1 for body in bodies[:warm])
    assert found["total"]["turns"] >= len(endpoint.prompts) - warm - 8  # the last ones may be in flight
    marks = set()
    for body in bodies:
        first = next(message for message in body["messages"] if message["role"] == "user")
        mark = re.match(r"\[rid:[0-9a-f]{12}\]\n\n", first["content"])
        assert mark
        marks.add(mark[0])
    assert len(marks) > 2  # sessions came again, each time with a mark of its own
    assert found["rules"]["cut_tails"] and not found["rules"]["count_template"]
    # A message more in each prompt than the first, and what the template adds to each is not of the trace.
    template = found["template_tokens"]
    assert found["total"]["largest_input_error"] > template["user"] + template["assistant"]
    reasons = " ".join(found["invalid_because"])
    assert not found["valid"] and "scaled by 1/8" in reasons and "gaps" in reasons


def test_marked_prompts_have_the_recorded_tokens(replay, endpoint, traces, tokenizer_dir):
    arguments = (traces / "trace_0460.json", "--url", endpoint.url, "--time-scale", 0, "--cache-bust")
    _, found = replay(*arguments, "--tokenizer", tokenizer_dir)
    # The mark's digits are cut differently from run to run, so its tokens are known to a few.
    assert abs(found["total"]["largest_input_error"]) <= 6
    assert found["total"]["hit_ratio"] > 0.98


def test_each_rule_can_be_taken_back(replay, endpoint, traces):
    arguments = lasting(30, endpoint, traces / "trace_0638.json", "--concurrency", 1)
    _, found = replay(*arguments, "--no-recycle", "--no-cache-bust", "--start-window", "0-0", "--warm-up", 0)
    assert found["warm_up_requests"] == 0 and found["total"]["turns"] == len(endpoint.prompts)
    assert not any(
        "[rid:" in message["content"] for body, _ in endpoint.requests for message in body["messages"]
    )
    assert any("not for 30 s" in reason for reason in found["invalid_because"])


def test_too_long_prompts_make_a_run_void(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, context=1500) as endpoint:
        arguments = lasting(2, endpoint, traces / "trace_0460.json", "--concurrency", 1)
        _, found = replay(*arguments, "--error-limit", 1)
    assert any("too long" in reason for reason in found["invalid_because"])


def test_an_open_loop_starts_sessions_when_they_arrive(replay, endpoint, tmp_path):
    rows = [
        {"timestamp": 1000 * number, "input_length": 600, "output_length": 2, "hash_ids": [0, number + 1]}
        for number in (0, 1, 4)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out.json"
    arguments = (path, "--url", endpoint.url, "--scale", 1, "--output", output)
    _, found = replay(*arguments, "--arrivals", "trace", "--time-scale", "0.1")
    sent = [row["sent_s"] for row in json.loads(output.read_text())["requests"]]
    # Late by what a busy machine takes, and far from the 1 and 4 s of the trace's own time.
    assert all(-0.01 < at - due < 0.8 for at, due in zip(sent, (0.0, 0.1, 0.4), strict=True))
    assert found["total"]["turns"] == 3 and found["total"]["theoretical_hit"] == pytest.approx(1024 / 1800)
    _, found = replay(*arguments, "--arrivals", "poisson", "--rate", 100)
    assert found["total"]["turns"] == 3 and found["wall_s"] < 3


def test_a_live_session_goes_on_from_what_was_answered(replay, endpoint, traces):
    trace = traces / "trace_0638.json"
    arguments = (trace, "--url", endpoint.url, "--scale", "1/32", "--time-scale", 0)
    _, found = replay(*arguments, "--live")
    first, second = (body for body, _ in endpoint.requests[:2])
    assert "ignore_eos" not in first and "min_tokens" not in first
    answers = [message for message in second["messages"] if message["role"] == "assistant"]
    assert answers[-1]["content"] == "x" * first["max_completion_tokens"]
    assert found["live"] and any("answers" in reason for reason in found["invalid_because"])
    endpoint.requests.clear()
    replay(*arguments)
    assert not any("xx" in message["content"] for message in endpoint.requests[1][0]["messages"])


def test_a_rate_belongs_to_poisson(endpoint, traces, capsys):
    assert main(["replay", str(traces), "--url", endpoint.url, "--rate", "3"]) == 2
    assert "--rate: belongs to" in capsys.readouterr().err
    for wrong in ("0.5", "0.8-0.2", "0-2"):
        with pytest.raises(SystemExit):
            main(["replay", str(traces), "--start-window", wrong])
        assert "--start-window" in capsys.readouterr().err


async def test_nothing_idles_for_longer_than_the_cap():
    clock = IdleCapClock(0.05)
    begin = time.perf_counter()
    first, second = await asyncio.gather(clock.sleep_until(begin + 60.0), clock.sleep_until(begin + 60.1))
    assert 0.1 < time.perf_counter() - begin < 10
    assert first - begin < 10 and 0.03 < second - first < 5
    assert 50 < clock.skipped_s < 60.1


async def test_a_request_in_flight_is_no_idleness():
    clock = IdleCapClock(0.01)
    begin = time.perf_counter()
    with clock.request():
        sleeper = asyncio.ensure_future(clock.sleep_until(begin + 30.0))
        await asyncio.sleep(0.1)
        assert not sleeper.done() and clock.skipped_s == 0
    await asyncio.wait_for(sleeper, 10)
    assert clock.skipped_s > 20


def test_a_scenario_is_a_set_of_rules():
    assert chosen("agentx", {"duration_s": None}) == AGENTX
    assert chosen("agentx", {"recycle": False}).recycle is False
    assert chosen("none", {}) == Rules()


def test_no_measured_request_is_no_valid_run():
    reasons = invalid_because(
        AGENTX,
        make_report([]),
        [],
        forced={},
        scale="1",
        time_scale=1,
        live=1,
        concurrency=1,
        measured_s=3600,
    )
    assert reasons == ["no request was measured"]
