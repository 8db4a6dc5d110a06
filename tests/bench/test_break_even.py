"""How ways are spelled, and what is divided by what."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from mocked_engine import mocked

from bench.break_even import break_even, read_way, seconds_a_round
from bench.engines import Engine, EngineFailure, Way

DRAFT = Path("/draft")


def test_ways_have_a_name_a_kind_and_arguments() -> None:
    assert read_way("a b: plain", DRAFT) == ("a b", Way())
    assert read_way("x: draft --flag 'two words'", DRAFT) == ("x", Way(DRAFT, ("--flag", "two words")))


@pytest.mark.parametrize("text", ["", "plain", ": plain", "x:", "x: drafted", "x: --flag"])
def test_what_is_no_way_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME: plain or NAME: draft"):
        read_way(text, DRAFT)


def test_a_round_is_divided_by_a_step_of_the_plain_way_before_it() -> None:
    ways = {"a": Way(), "b": Way(DRAFT), "c": Way(), "d": Way(DRAFT), "e": Way(DRAFT)}
    found = {
        "a": {"1": 2.0, "2": 4.0},
        "b": {"1": 3.0, "2": 20.0},
        "c": {"1": 1.0},
        "d": {"1": 3.0, "2": 5.0},
    }
    assert break_even(ways, found) == {"b": {"1": 1.5, "2": 5.0}, "d": {"1": 3.0}}


def engine_that_writes(tokens: int, rounds: int | None) -> Engine:
    def answer(request: httpx.Request) -> httpx.Response:
        meta: dict[str, Any] = {"completion_tokens": tokens}
        if rounds is not None:
            meta["spec_verify_ct"] = rounds
        if not json.loads(request.content).get("stream"):
            return httpx.Response(200, json={"output_ids": [1], "meta_info": {}})
        event = json.dumps({"output_ids": [1], "meta_info": meta})
        return httpx.Response(200, text=f"data: {event}\n\ndata: {event}\n\ndata: [DONE]\n\n")

    return mocked(answer)


@pytest.mark.parametrize(("rounds", "divisor"), [(None, 8), (2, 2)])
def test_rounds_are_what_the_engine_counts_and_steps_the_tokens_after_the_first(
    monkeypatch: pytest.MonkeyPatch, rounds: int | None, divisor: int
) -> None:
    clock = iter(range(0, 1000, 16))
    monkeypatch.setattr("bench.break_even.time.perf_counter", lambda: next(clock))
    assert seconds_a_round(engine_that_writes(9, rounds), 64, 9, 2, 100) == [16 / divisor] * 2


def test_an_engine_that_ends_early_is_a_failure() -> None:
    with pytest.raises(EngineFailure, match="wrote 3 of 9 tokens"):
        seconds_a_round(engine_that_writes(3, None), 64, 9, 1, 100)
