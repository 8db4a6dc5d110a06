"""The report to look at, and two runs beside each other."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from stub_endpoint import StubEndpoint

from replay.html import figures, page
from service.cli import main

FIXTURES = Path(__file__).parent / "fixtures" / "traces"
VOID = {"meta"}


class Balanced(HTMLParser):
    """Fails for tags that are not closed in order, and for anything loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = {}

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        assert tag not in ("script", "link", "img")
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text) -> dict[str, int]:
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    return parser.seen


@pytest.fixture(scope="module")
def runs(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    paths = []
    for name, scale in (("a", "1/32"), ("b", "1/16")):
        path = folder / f"{name}.json"
        html = ["--html", str(folder / "a.html")] if name == "a" else []
        with StubEndpoint(tokenizer) as endpoint:
            arguments = [str(FIXTURES), "--url", endpoint.url, "--scale", scale, "--time-scale", "0"]
            assert main(["replay", *arguments, "--output", str(path), "--json", *html]) == 0
        paths.append(path)
    return paths


def test_a_run_is_one_file_with_its_figures(runs):
    text = runs[0].with_suffix(".html").read_text()
    seen = parsed(text)
    assert seen["svg"] == 4 + 1 + 1 and "http-equiv" not in text
    run = json.loads(runs[0].read_text())
    found = figures(run)
    assert f"{run['total']['input_seen']:,}" in text
    assert found["hit rate"] == run["total"]["actual_hit"]
    ttft = run["total"]["ttft_s"]
    assert found["Time to the first token p90, s"] == pytest.approx(ttft["p90"], abs=1e-6)
    assert len(re.findall("#aed6f1", text)) == run["total"]["turns"]
    for session in run["sessions"]:
        assert session["name"] in text


def test_two_runs_beside_each_other(runs, tmp_path, capsys):
    both = tmp_path / "both.html"
    assert main(["replay", "compare", *map(str, runs), "--html", str(both), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == ["a", "b"]
    tokens = found["figures"]["prompt tokens"]
    assert 1.8 < tokens["b"] / tokens["a"] < 2.2
    parsed(both.read_text())
    assert main(["replay", "compare", *map(str, runs)]) == 0
    assert "hit rate in theory" in capsys.readouterr().out


def test_failures_and_silence_about_the_cache_are_shown(runs):
    run = json.loads(runs[0].read_text())
    row = run["requests"][0]
    run["requests"][0] = {
        **{name: row[name] for name in ("session", "agent", "turn", "sent_s")},
        "failure": "http 503 <script>",
    }
    run["total"]["cached_tokens"] = run["total"]["tiers"] = None
    run.update(scenario="agentx", valid=False, invalid_because=["a & b"])
    text = page([("x", run)])
    parsed(text)
    assert "http 503 &lt;script&gt;" in text and "not valid: a &amp; b" in text
    assert "does not report cached tokens" in text


@pytest.mark.parametrize(
    ("content", "problem"), [("{", "not JSON"), ("[]", "must be an object"), ("{}", "no 'requests'")]
)
def test_what_can_not_be_compared(runs, tmp_path, capsys, content, problem):
    path = tmp_path / "c.json"
    path.write_text(content)
    assert main(["replay", "compare", str(runs[0]), str(path)]) == 2
    assert problem in capsys.readouterr().err
    assert main(["replay", "compare", str(runs[0])]) == 2
    assert "needs two files" in capsys.readouterr().err
