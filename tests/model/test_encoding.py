import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_conversations import conversations

from model.encoding import (
    CLOSE,
    END_OF_MESSAGE,
    IMAGE_PLACEHOLDER,
    OPEN,
    SEP,
    EncodingError,
    conversation_segments,
    generation_segments,
    head_segments,
    message_segments,
    messages_segments,
    tail_segments,
)

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("cases.json").read_text())


def flat(segments: list[tuple[str, bool]]) -> str:
    return "".join(text for text, _ in segments)


def call(name: str = "f", arguments: object = "{}", id: str | None = "a") -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if id is None else {"id": id, **made}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_renders_as_the_published_encoder(case: dict[str, Any]) -> None:
    expected = [(text, bool(markup)) for text, markup in case["segments"]]
    assert conversation_segments(**case["input"]) == expected


def test_has_all_published_cases() -> None:
    assert len(CASES) == 31


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_conversation_is_the_sum_of_its_parts(case: dict[str, Any]) -> None:
    given = dict(case["input"])
    thinking, effort = given.get("thinking", True), given.get("thinking_effort")
    parts = [
        *head_segments(given.get("tools"), thinking=thinking, thinking_effort=effort),
        *messages_segments(given["messages"], thinking=thinking, image_prompts=given.get("image_prompts")),
        *tail_segments(given.get("tool_choice"), given.get("response_format")),
        *(generation_segments(thinking) if given.get("add_generation_prompt", True) else []),
    ]
    assert parts == conversation_segments(**given)


@given(conversations(), st.booleans())
def test_turns_extend_each_other(turns: list[list[dict[str, Any]]], thinking: bool) -> None:
    before: list[tuple[str, bool]] = head_segments(None, thinking=thinking, thinking_effort="high")
    messages: list[dict[str, Any]] = []
    for added in turns:
        messages += added
        after = [
            *head_segments(None, thinking=thinking, thinking_effort="high"),
            *messages_segments(messages, thinking=thinking),
        ]
        assert after[: len(before)] == before
        before = after


@given(conversations())
def test_messages_after_an_assistant_encode_alone(turns: list[list[dict[str, Any]]]) -> None:
    messages = [message for added in turns for message in added]
    whole = messages_segments(messages)
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            known = messages_segments(messages[: at + 1])
            rest = messages_segments(messages[at + 1 :], calls=message["tool_calls"])
            assert known + rest == whole


@given(conversations())
def test_markup_comes_from_the_encoder_alone(turns: list[list[dict[str, Any]]]) -> None:
    messages = [message for added in turns for message in added]
    for text, is_markup in conversation_segments(messages):
        assert text
        assert not is_markup or text in (OPEN, CLOSE, SEP, END_OF_MESSAGE)


@given(conversations())
def test_structure_is_balanced(turns: list[list[dict[str, Any]]]) -> None:
    open_tags: list[str] = []
    segments = messages_segments([message for added in turns for message in added])
    for (text, is_markup), (following, _) in zip(segments, [*segments[1:], ("", True)], strict=True):
        if is_markup and text == OPEN:
            open_tags.append(following)
        elif is_markup and text == CLOSE:
            assert open_tags.pop() == following
        elif is_markup and text == END_OF_MESSAGE:
            assert open_tags == []
    assert open_tags == []


@given(conversations())
def test_rendering_leaves_the_messages_alone(turns: list[list[dict[str, Any]]]) -> None:
    messages = [message for added in turns for message in added]
    before = json.dumps(messages)
    conversation_segments(messages)
    assert json.dumps(messages) == before


@given(conversations())
def test_arguments_as_text_or_object_are_the_same(turns: list[list[dict[str, Any]]]) -> None:
    messages = [message for added in turns for message in added]
    as_text = json.loads(json.dumps(messages))
    for message in as_text:
        for made in message.get("tool_calls", []):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    assert messages_segments(as_text) == messages_segments(messages)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("", "string", ""),
        ("3", "string", "3"),
        ('say "hi"\n<|close|>', "string", 'say "hi"\n<|close|>'),
        (3, "number", "3"),
        (1e2, "number", "100.0"),
        (-0.5, "number", "-0.5"),
        (True, "boolean", "true"),
        (None, "null", "null"),
        ([], "array", "[]"),
        ([1, "é"], "array", '[1, "é"]'),
        ({"b": {"a": 1}}, "object", '{"b": {"a": 1}}'),
    ],
)
def test_argument_values(value: object, kind: str, text: str) -> None:
    rendered = flat(
        message_segments({"role": "assistant", "tool_calls": [call(arguments={'a "b" & c': value})]})
    )
    key = "a &quot;b&quot; &amp; c"
    expected = f'{OPEN}argument key="{key}" type="{kind}"{SEP}{text}{CLOSE}argument{SEP}'
    assert f"{SEP}{expected}{CLOSE}call" in rendered


@pytest.mark.parametrize("arguments", [None, "", " \n", "{}", {}])
def test_a_call_may_have_no_arguments(arguments: object) -> None:
    rendered = flat(message_segments({"role": "assistant", "tool_calls": [call(arguments=arguments)]}))
    assert f'{OPEN}call tool="f" index="1"{SEP}{CLOSE}call{SEP}' in rendered


def test_thinking_off_leaves_the_channel_out() -> None:
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    rendered = flat(messages_segments([message], thinking=False))
    assert rendered == (
        f'{OPEN}message role="assistant"{SEP}{OPEN}response{SEP}4{CLOSE}response{SEP}'
        f"{CLOSE}message{SEP}{END_OF_MESSAGE}"
    )
    assert flat(generation_segments(False)) == f'{OPEN}message role="assistant"{SEP}{OPEN}response{SEP}'


@pytest.mark.parametrize(("reasoning", "kept"), [(" \n", ""), ("", ""), (None, ""), (" why \n", " why \n")])
def test_reasoning_is_kept_to_the_letter_unless_blank(reasoning: str | None, kept: str) -> None:
    rendered = flat(message_segments({"role": "assistant", "content": "", "reasoning_content": reasoning}))
    assert f"{OPEN}think{SEP}{kept}{CLOSE}think{SEP}" in rendered


def test_results_with_an_unknown_id_stay_where_they_are() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", id="a"), call("g", id="b")]}
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "lost", "content": "1"},
    ]
    rendered = flat(messages_segments([assistant, *results]))
    assert f'tool="f" index="1"{SEP}2' in rendered  # by position: the run is not resolved
    assert f'tool="g" index="2"{SEP}1' in rendered


def test_the_index_counts_results_not_calls() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", id="a"), call("g", id="b")]}
    only_second = {"role": "tool", "tool_call_id": "b", "content": "2"}
    assert f'tool="g" index="1"{SEP}2' in flat(messages_segments([assistant, only_second]))


def test_the_answered_call_names_the_tool() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", id="a")]}
    result = {"role": "tool", "tool_call_id": "a", "name": "stale", "content": "1"}
    assert 'tool="f" index="1"' in flat(messages_segments([assistant, result]))


def test_equal_ids_answer_the_first_call() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("f", id="a"), call("g", id="a")]}
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    assert 'tool="f" index="1"' in flat(messages_segments([assistant, result]))


def test_results_count_on_across_other_messages() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("f", id="a"), call("g", id="b")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "user", "content": "wait"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    assert f'tool="g" index="2"{SEP}2' in flat(messages_segments(messages))


def test_developer_is_system() -> None:
    developer = message_segments({"role": "developer", "content": "Be brief."})
    assert developer == message_segments({"role": "system", "content": "Be brief."})


def test_an_image_without_prompts_is_a_placeholder() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert (IMAGE_PLACEHOLDER, True) in message_segments({"role": "user", "content": [part]})


def test_schema_is_found_where_clients_put_it() -> None:
    schema = {"type": "object"}
    nested = tail_segments(None, {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    bare = tail_segments(None, {"type": "json_schema", "json_schema": schema})
    assert nested == bare


@pytest.mark.parametrize("tool_choice", [None, "auto", {"type": "function", "function": {"name": "f"}}])
def test_other_tool_choices_and_text_are_silent(tool_choice: object) -> None:
    assert tail_segments(tool_choice, {"type": "text"}) == []


ASSISTANT = {"role": "assistant", "content": ""}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("role", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "user"),
    ("no role", {"messages": [{"content": ""}]}, "messages[0].role", "user"),
    ("message", {"messages": ["hello"]}, "messages[0]", "object"),
    ("effort", {"messages": [], "thinking_effort": "medium"}, "thinking_effort", "low, high, max"),
    ("content", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "list of parts"),
    ("part", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "object"),
    (
        "part type",
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "messages[0].content[0].type",
        "text",
    ),
    (
        "part text",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content[0].text",
        "text",
    ),
    (
        "arguments",
        {"messages": [{**ASSISTANT, "tool_calls": [call(arguments="[1]")]}]},
        "messages[0].tool_calls[0].function.arguments",
        "object",
    ),
    (
        "arguments type",
        {"messages": [{**ASSISTANT, "tool_calls": [call(arguments=3)]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON",
    ),
    (
        "huge number",
        {"messages": [{**ASSISTANT, "tool_calls": [call(arguments='{"a":' + "9" * 5000 + "}")]}]},
        "messages[0].tool_calls[0].function.arguments",
        "string",
    ),
    (
        "deep arguments",
        {"messages": [{**ASSISTANT, "tool_calls": [call(arguments='{"a":' * 100_000)]}]},
        "messages[0].tool_calls[0].function.arguments",
        "flatten",
    ),
    (
        "call name",
        {"messages": [{**ASSISTANT, "tool_calls": [{"id": "a", "function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
        "name",
    ),
    (
        "call",
        {"messages": [{**ASSISTANT, "tool_calls": ["f"]}]},
        "messages[0].tool_calls[0]",
        "function",
    ),
    ("calls", {"messages": [{**ASSISTANT, "tool_calls": "f"}]}, "messages[0].tool_calls", "list"),
    (
        "reasoning",
        {"messages": [{**ASSISTANT, "reasoning_content": ["why"]}]},
        "messages[0].reasoning_content",
        "text",
    ),
    ("orphan", {"messages": [{"role": "tool", "content": "1"}]}, "messages[0]", "name"),
    ("tools", {"messages": [], "tools": "f"}, "tools", "list"),
    ("tool", {"messages": [], "tools": ["f"]}, "tools", "object"),
    (
        "dynamic tools",
        {"messages": [{"role": "system", "tools": ["f"]}]},
        "messages[0].tools",
        "object",
    ),
    ("format", {"messages": [], "response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (
        "schema",
        {"messages": [], "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "schema",
    ),
    (
        "too few images",
        {"messages": [{"role": "user", "content": IMAGE_PLACEHOLDER}], "image_prompts": []},
        "messages[0].content",
        "image prompt",
    ),
    ("too many images", {"messages": [], "image_prompts": ["x"]}, "image_prompts", "image"),
]


@pytest.mark.parametrize(("what", "given", "field", "remedy"), WRONG)
def test_bad_input_names_field_and_remedy(what: str, given: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(EncodingError) as raised:
        conversation_segments(**given)
    assert raised.value.field == field
    assert remedy in raised.value.problem
    assert str(raised.value).startswith(f"{field}: ")


def test_needs_nothing_but_the_standard_library() -> None:
    source = Path(__file__).parents[2] / "model" / "encoding.py"
    code = f"import runpy; runpy.run_path({str(source)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
