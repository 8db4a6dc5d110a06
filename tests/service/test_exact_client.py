"""A client that drops and rewrites gets the prompts of one that sends everything back."""

from pathlib import Path

import pytest

from bench.exact_client import altered, measure
from model import tiny


@pytest.mark.engine
def test_what_the_client_does_changes_no_prompt(tmp_path: Path) -> None:
    model = tiny.build(tiny.default_path()).path.absolute()
    report = measure(model, tmp_path, turns=4)
    assert report["equal"]
    assert report["prefix_exact"]
    assert report["calls"] > 0
    assert report["each"][0]["restored"] == "reasoning=0, ids=0"
    assert report["each"][-1]["restored"] not in ("reasoning=0, ids=0", report["each"][1]["restored"])


def test_the_client_alters_what_it_says_it_alters() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    assistant, result = altered(messages)
    assert "reasoning_content" not in assistant
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"b":2,"a":1}'
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] == "functions.f:0"
