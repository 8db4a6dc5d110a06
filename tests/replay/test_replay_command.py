"""The command against a real HTTP server that counts with a real tokenizer."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from stub_endpoint import StubEndpoint

from service.cli import main


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def replay(capsys):
    def run(*arguments) -> Outcome:
        capsys.readouterr()
        status = main(["replay", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    return run


def result(process: Outcome) -> dict:
    return json.loads(process.stdout.splitlines()[-1])


def common(left, right) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))


@pytest.mark.slow
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_full_size_prompts_are_exact(replay, endpoint, traces, tokenizer_dir, with_tokenizer):
    arguments = ["--tokenizer", tokenizer_dir] if with_tokenizer else []
    process = replay(
        traces, "--url", endpoint.url, "--time-scale", 0, "--max-turns", 5, "--json", "--seed", 3, *arguments
    )
    assert process.returncode == 0, process.stderr
    document = result(process)
    total = document["total"]
    assert document["scale"] == "1" and total["turns"] == 5 + 5 + 5 + 3 + 3
    assert total["input_seen"] == total["input_requested"] and total["largest_input_error"] == 0
    assert total["output_seen"] == total["output_requested"]
    assert sum(map(len, endpoint.prompts)) == total["input_requested"]
    assert total["cached_tokens"] == sum(endpoint.cached)
    assert total["hit_ratio"] == pytest.approx(1.0, abs=0.01)


def test_small_prompts_hit_what_an_infinite_cache_would(replay, endpoint, traces, tmp_path):
    output = tmp_path / "out.json"
    process = replay(
        traces, "--url", endpoint.url, "--scale", "1/32", "--time-scale", 0, "--json", "--output", output
    )
    assert process.returncode == 0, process.stderr
    document = result(process)
    assert document["total"]["hit_ratio"] == pytest.approx(1.0, abs=0.02)
    assert document["total"]["errors"] == 0
    assert [session["name"] for session in document["sessions"]] == ["trace_0291", "trace_0460", "trace_0638"]
    rows = json.loads(output.read_text())["requests"]
    assert len(rows) == document["total"]["turns"] == len(endpoint.prompts)
    pair = document["template_tokens"]["user"] + document["template_tokens"]["assistant"] + 2
    assert all(abs(row["input_seen"] - row["input_requested"]) <= pair / 2 for row in rows)
    assert sum(row["input_seen"] for row in rows) == document["total"]["input_seen"]


def test_a_seed_makes_the_same_prompts_and_another_one_shares_nothing(replay, tokenizer, traces):
    prompts = []
    for seed in (1, 1, 2):
        with StubEndpoint(tokenizer) as stub:
            trace = traces / "trace_0638.json"
            process = replay(trace, "--url", stub.url, "--scale", "1/8", "--time-scale", 0, "--seed", seed)
            assert process.returncode == 0, process.stderr
            prompts.append(stub.prompts)
    assert prompts[0] == prompts[1]
    assert common(prompts[0][0], prompts[2][0]) < 12  # the template's opening, and perhaps a word


def test_conversations_have_their_own_ids_and_each_session_its_own_text(replay, endpoint, traces):
    trace = traces / "trace_0291_cut.json"
    process = replay(trace, trace, "--url", endpoint.url, "--scale", "1/32", "--time-scale", 0, "--json")
    assert process.returncode == 0, process.stderr
    assert [session["name"] for session in result(process)["sessions"]] == ["trace_0291", "trace_0291#2"]
    assert result(process)["total"]["hit_ratio"] == pytest.approx(1.0, abs=0.02)
    assert len(endpoint.ports) <= 6  # connections are kept: two live trees of three conversations
    conversations = {headers["x-correlation-id"] for _, headers in endpoint.requests}
    assert len(conversations) == 2 * 3
    assert len({headers["x-request-id"] for _, headers in endpoint.requests}) == len(endpoint.requests)


def test_the_scale_follows_the_models_context(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, context=20_000) as stub:
        process = replay(traces, "--url", stub.url, "--time-scale", 0, "--json", "--max-turns", 2)
        assert process.returncode == 0, process.stderr
        assert result(process)["scale"] == "1/2"
        process = replay(
            traces,
            "--url",
            stub.url,
            "--scale",
            "1/4",
            "--max-context",
            10_000,
            "--json",
            "--max-turns",
            4,
            "--time-scale",
            0,
        )
        assert result(process)["skipped_sessions"] == ["trace_0291"]
        assert "left out above 10,000 tokens: trace_0291" in process.stderr


def test_failed_requests_are_counted_and_decide_the_exit_status(replay, tokenizer, traces):
    trace = traces / "trace_0460.json"
    arguments = ("--scale", "1/32", "--time-scale", 0, "--json")
    with StubEndpoint(tokenizer, fails={2: 503}) as stub:
        process = replay(trace, "--url", stub.url, *arguments)
        assert process.returncode == 1
        document = result(process)
        assert document["failures"] == {"http 503": 1} and document["ok"] is False
        assert document["total"]["turns"] == 12 and document["total"]["errors"] == 1
    with StubEndpoint(tokenizer, fails={2: 503}) as stub:
        assert replay(trace, "--url", stub.url, *arguments, "--error-limit", 0.5).returncode == 0


def test_an_endpoint_that_only_fails_ends_the_replay(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, fails=dict.fromkeys(range(1000), 500)) as stub:
        process = replay(traces, "--url", stub.url, "--scale", "1/32", "--time-scale", 0, "--json")
    assert process.returncode == 1
    document = result(process)
    assert "20 requests in a row failed" in document["stopped"] and "told to fail" in document["stopped"]
    assert document["total"]["turns"] < 31


def test_a_strict_endpoint_gets_no_forced_lengths(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, refuses_unknown_fields=True) as stub:
        process = replay(
            traces / "trace_0638.json", "--url", stub.url, "--scale", "1/32", "--time-scale", 0, "--json"
        )
    assert process.returncode == 0, process.stderr
    assert "refuses ignore_eos, min_tokens" in process.stderr
    assert not any(result(process)["forced"].values())


def test_tiers_come_from_metrics_when_answers_have_none(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, reports_tiers=False) as stub:
        stub.metrics_page = (
            '# TYPE sglang:cached_tokens counter\nsglang:cached_tokens_total{cache_source="device"} 7\n'
        )
        process = replay(
            traces / "trace_0638.json", "--url", stub.url, "--scale", "1/32", "--time-scale", 0, "--json"
        )
    document = result(process)
    assert document["tiers_source"] == "metrics"
    assert document["total"]["tiers"] == {"device": 0, "host": 0, "storage": 0}


def test_the_accept_length_comes_from_metrics(replay, tokenizer, traces, tmp_path):
    with StubEndpoint(tokenizer) as stub:
        stub.metrics_pages = [
            f"# TYPE sglang:generation_tokens counter\nsglang:generation_tokens_total {tokens}\n"
            f"# TYPE sglang:spec_verify_calls counter\nsglang:spec_verify_calls_total {calls}\n"
            for tokens, calls in ((1000, 900), (1600, 1100))
        ]
        page = tmp_path / "run.html"
        process = replay(
            *(traces / "trace_0638.json", "--url", stub.url, "--scale", "1/32", "--time-scale", 0),
            *("--html", page, "--output", tmp_path / "run.json"),
        )
    assert process.returncode == 0, process.stderr
    assert "accept length 3.00" in process.stdout
    assert json.loads((tmp_path / "run.json").read_text())["accept_length"] == 3.0
    assert "<tr><td>accept length</td><td>3</td></tr>" in page.read_text()


def test_an_endpoint_that_says_nothing_of_its_cache(replay, tokenizer, traces):
    with StubEndpoint(tokenizer, reports_tiers=False, reports_cache=False) as stub:
        process = replay(traces / "trace_0638.json", "--url", stub.url, "--scale", "1/32", "--time-scale", 0)
    assert process.returncode == 0, process.stderr
    assert "trace_0638" in process.stdout and "Prefix cache" in process.stdout


def test_ctrl_c_gives_the_report_so_far(tokenizer, traces):
    with StubEndpoint(tokenizer, token_s=0.05) as stub:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "service.cli", "replay", str(traces), "--url", stub.url),
                *("--scale", "1/32", "--json"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while len(stub.prompts) < 5:
            assert process.poll() is None, process.stderr
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    document = json.loads(stdout.splitlines()[-1])
    assert document["interrupted"] and not document["ok"]
    assert 0 < document["total"]["turns"] < 31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "nowhere.json: no such file"),
        (["TRACES", "--scale", "3"], "--scale"),
        (["TRACES", "--api-key-env", "NO_SUCH_KEY_HERE"], "NO_SUCH_KEY_HERE"),
        (["TRACES", "--url", "http://127.0.0.1:9"], "can't be reached"),
        (["TRACES", "--tokenizer", "TRACES"], "no tokenizer.json"),
        (["TRACES", "--scale", "1", "--max-context", "100"], "no session fits"),
    ],
)
def test_what_can_not_be_replayed_is_said_in_one_line(replay, endpoint, traces, arguments, message):
    given = [str(traces) if argument == "TRACES" else argument for argument in arguments]
    process = replay(*["--url", endpoint.url], *given)
    assert process.returncode == 2
    assert message in process.stderr and "Traceback" not in process.stderr
    assert process.stdout == ""


@pytest.mark.parametrize("text", ["-1", "1/0", "soon", "nan"])
def test_a_time_scale_is_a_number_or_a_fraction(replay, capsys, text):
    with pytest.raises(SystemExit) as caught:
        replay("trace.json", f"--time-scale={text}")
    assert caught.value.code == 2 and "--time-scale" in capsys.readouterr().err
