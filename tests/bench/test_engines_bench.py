"""What measurements hear of `/generate`: its answers, its events, and its refusals with their text."""

import json

import httpx
import pytest
from mocked_engine import mocked

from bench.engines import EngineFailure

EVENTS = [{"output_ids": [n], "meta_info": {"completion_tokens": n}} for n in (1, 2)]


def streamed(*events: object) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def test_events_come_as_they_were_sent() -> None:
    sent: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return streamed(*EVENTS)

    assert list(mocked(answer).stream({"input_ids": [7]})) == EVENTS
    assert sent == [{"input_ids": [7], "stream": True}]


def test_an_error_within_a_stream_is_a_failure_after_what_came_before() -> None:
    events = mocked(lambda _: streamed(EVENTS[0], {"error": {"message": "no room"}})).stream({})
    assert next(events) == EVENTS[0]
    with pytest.raises(EngineFailure, match="no room"):
        next(events)


def test_refusals_are_failures_with_the_engines_words() -> None:
    engine = mocked(lambda _: httpx.Response(400, text="too long"))
    with pytest.raises(EngineFailure, match="answered 400: too long"):
        engine.ask({})
    with pytest.raises(EngineFailure, match="answered 400: too long"):
        list(engine.stream({}))
    with pytest.raises(EngineFailure, match="answered 400: too long"):
        engine.generate([1], 1)
