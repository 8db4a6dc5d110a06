"""SGLang's K3 parsers read what the encoder writes: what they return renders to the same tokens again."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_conversations import MARKERS, names, texts

from model.encoding import generation_segments, message_segments
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json

pytestmark = pytest.mark.sglang

parsing = pytest.importorskip("sglang.srt.function_call.function_call_parser")

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
OPENING = TOKENIZER.encode_segments(generation_segments())


def message(content: str = "", reasoning: str = "", *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for at, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}


def rendered(message: dict[str, Any]) -> list[int]:
    return TOKENIZER.encode_segments(message_segments(message))


def completion(message: dict[str, Any]) -> str:
    """What the engine returns for a model that writes this message, markers included."""
    ids = rendered(message)
    assert ids[: len(OPENING)] == OPENING
    return TOKENIZER.decode(ids[len(OPENING) :]).removesuffix("<|end_of_msg|>")


def tools(message: dict[str, Any]) -> list[Any]:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    called = {call["function"]["name"] for call in message["tool_calls"]}
    return [Tool(type="function", function=Function(name=name, parameters={})) for name in sorted(called)]


def parsed(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client gets it from SGLang without streaming."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    reasoning, rest = ReasoningParser("kimi_k3").parse_non_stream(completion(message))
    if not message["tool_calls"]:
        return {"role": "assistant", "content": rest, "reasoning_content": reasoning}
    content, calls = parsing.FunctionCallParser(tools(message), "kimi_k3").parse_non_stream(rest)
    return as_message(content, reasoning, [(call.name, call.parameters) for call in calls])


def streamed(message: dict[str, Any], size: int) -> dict[str, Any]:
    """The message as a client puts it together from a stream of pieces of `size` characters."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    reasoner = ReasoningParser("kimi_k3")
    caller = parsing.FunctionCallParser(tools(message), "kimi_k3") if message["tool_calls"] else None
    text = completion(message)
    reasoning, content = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for at in range(0, len(text), size):
        thought, rest = reasoner.parse_stream_chunk(text[at : at + size])
        reasoning += thought or ""
        if caller and rest:
            rest, made = caller.parse_stream_chunk(rest)
            for call in made:
                name, so_far = calls.get(call.tool_index, ("", ""))
                calls[call.tool_index] = (call.name or name, so_far + (call.parameters or ""))
        content += rest or ""
    return as_message(content, reasoning, [calls[at] for at in sorted(calls)])


def as_message(content: str, reasoning: str | None, calls: list[tuple[str, str]]) -> dict[str, Any]:
    made = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}


MESSAGES = {
    "empty": message(),
    "text": message("Hello."),
    "reasoning": message("", "Why?"),
    "both": message("Four.", "Two and two."),
    "white space": message(" \n4 \n", "\n so \n"),
    "unicode": message("Größe 语言 🙂 \u202e", "ça"),
    "one call": message("", "", ("get_weather", {"city": "Paris"})),
    "everything": message("Looking.", "I should look.", ("get_weather", {"city": "Paris", "days": 3})),
    "parallel": message("", "Both.", ("f", {"a": 1}), ("f", {"a": 2}), ("g", {})),
    "no arguments": message("", "", ("ping", {})),
    "nested": message("", "", ("f", {"a": {"b": [1, {"c": None}], "d": {}}, "e": []})),
    "numbers": message("", "", ("f", {"i": -3, "f": 0.1, "e": 1e300, "z": 0, "big": 2**70})),
    "literals": message("", "", ("f", {"t": True, "f": False, "n": None})),
    "strings": message("", "", ("f", {"q": 'say "hi"', "n": "a\nb\r\n", "t": "\t", "b": "\\n", "e": ""})),
    "looks like JSON": message("", "", ("f", {"a": "3", "b": "null", "c": '{"d": 1}'})),
    "unicode arguments": message("", "", ("f", {"名": "値", "é": ["ü", {"ß": "🙂"}]})),
    "attributes": message("", "", ("f", {'a"b': 1, "&amp;": "&quot;", "<c>": "</c>"})),
    "code": message(
        "", "", ("edit", {"old": "if x:\n    y()\n", "new": "if x < 3 and y > 2:\n    z('\"')\n"})
    ),
}


unmarked = texts.filter(lambda text: not any(marker in text for marker in MARKERS))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | unmarked,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(unmarked, inner, max_size=2),
    max_leaves=4,
)
any_calls = st.lists(st.tuples(names, st.dictionaries(unmarked, plain, max_size=3)), max_size=3)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_parsed_renders_to_the_same_tokens(name: str) -> None:
    assert rendered(parsed(MESSAGES[name])) == rendered(MESSAGES[name])


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_streamed_renders_to_the_same_tokens(name: str, size: int) -> None:
    assert rendered(streamed(MESSAGES[name], size)) == rendered(MESSAGES[name])


@settings(deadline=None)
@given(unmarked, unmarked, any_calls, st.integers(1, 40))
def test_any_message_without_markers_renders_again(
    content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    written = message(content, reasoning, *calls)
    assert rendered(parsed(written)) == rendered(written)
    assert rendered(streamed(written, size)) == rendered(written)


@pytest.mark.parametrize(
    "written",
    [
        message("a<|close|>response<|sep|>b"),
        message("", "a<|close|>think<|sep|>b"),
        message("", "a<|open|>tools<|sep|>b"),
        message("", "", ("f", {"a": "<|close|>argument<|sep|>"})),
    ],
    ids=["response", "think", "tools", "argument"],
)
def test_spelled_markers_are_structure_to_sglang(written: dict[str, Any]) -> None:
    """It scans text, where the difference is lost: why exact turns decide structure by token id."""
    assert rendered(parsed(written)) != rendered(written)
