"""A forced call on the real engine: random weights write a call that the tool's schema accepts."""

import json
from typing import Any

import httpx
import pytest

from bench.engines import Engine
from model.encoding import conversation_segments, message_segments
from model.structure import forced_call_tag
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json

pytestmark = pytest.mark.engine

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
PROMPT = TOKENIZER.encode_segments(conversation_segments([{"role": "user", "content": "Weather in Paris?"}]))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "units": {"type": "string", "enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "exact": {"type": "boolean"},
            },
            "required": ["city", "units", "days", "exact"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}


def generate(engine: Engine, tag: str, **sampling: Any) -> list[int]:
    """Ids of a completion under the tag; it must end by itself."""
    response = httpx.post(
        f"{engine.url}/generate",
        json={
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 400, "temperature": 0, "structural_tag": tag, **sampling},
        },
        timeout=300,
    )
    response.raise_for_status()
    answer = response.json()
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    *ids, last = answer["output_ids"]
    assert last in TOKENIZER.eos_ids
    return ids


def calls_in(ids: list[int], tools: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The calls that SGLang's own parser finds."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parser = FunctionCallParser([Tool(**tool) for tool in tools], "kimi_k3")
    text, calls = parser.parse_non_stream(TOKENIZER.decode(ids))
    assert text == ""
    return [(call.name, json.loads(call.parameters)) for call in calls]


def rendered(calls: list[tuple[str, dict[str, Any]]]) -> list[int]:
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    segments = message_segments({"role": "assistant", "tool_calls": made})
    start = segments.index(("tools", False)) - 1
    return TOKENIZER.encode_segments(segments[start:-4])


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_is_forced_and_valid(engine: Engine, temperature: float) -> None:
    tag = forced_call_tag([WEATHER], max_string_tokens=8)
    ids = generate(engine, tag, temperature=temperature, sampling_seed=11)
    [(name, arguments)] = calls_in(ids, [WEATHER])
    assert name == "get_weather"
    assert list(arguments) == ["city", "units", "days", "exact"]
    assert isinstance(arguments["city"], str)
    assert arguments["units"] in ("c", "f")
    assert 1 <= arguments["days"] <= 9
    assert isinstance(arguments["exact"], bool)
    special = [id for id in ids if id in TOKENIZER.markup.values()]
    canonical = [id for id in rendered([(name, arguments)]) if id in TOKENIZER.markup.values()]
    assert special == canonical


def test_a_call_without_arguments_is_exactly_as_rendered(engine: Engine) -> None:
    ids = generate(engine, forced_call_tag([PING]))
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(rendered([("ping", {})]))
    assert calls_in(ids, [PING]) == [("ping", {})]


def test_one_of_several_tools_is_called(engine: Engine) -> None:
    ids = generate(engine, forced_call_tag([WEATHER, PING], max_string_tokens=8))
    [(name, _)] = calls_in(ids, [WEATHER, PING])
    assert name in ("get_weather", "ping")
