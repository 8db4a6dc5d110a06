import copy
from typing import Any

import pytest
from client_changes import changed
from hypothesis import assume, given
from hypothesis import strategies as st
from k3_messages import TEXT, VISIBLE_TEXT, assistant_messages

from service import marks
from service.conversation import Conversation
from service.digest import NO_REASONING, Chain, chain, reasoning_digest

SALT = b"tenant"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def digests(messages: list[dict[str, Any]], *, salt: bytes = SALT, **settings: Any) -> Chain:
    conversation = Conversation(messages=tuple(messages), **settings)
    return chain(salt, conversation, conversation.messages)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages with tool results for every call."""
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    )
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(VISIBLE_TEXT)})
        answer = copy.deepcopy(draw(assistant_messages()))
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            call["id"] = f"{turn}_{call['id']}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)})
    return messages


def call(arguments: str, *, name: str = "f", id: str = "a") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


@given(conversations(), st.integers())
def test_clients_changes_do_not_show(messages: list[dict[str, Any]], seed: int) -> None:
    before, after = digests(messages), digests(changed(messages, seed))
    ends = [end for end, message in enumerate(messages, start=1) if message["role"] != "tool"]
    assert [before.digests[end] for end in ends] == [after.digests[end] for end in ends]
    assert before.digests[-1] == after.digests[-1]
    assert before.fingerprints == after.fingerprints


@given(conversations(), st.data())
def test_visible_changes_show_from_there_on(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(messages) - 1))
    other = copy.deepcopy(messages)
    other[place]["content"] = (messages[place]["content"] or "") + "!"
    before, after = digests(messages), digests(other)
    for end in range(len(messages) + 1):
        assert (before.digests[end] == after.digests[end]) == (end <= place)
    shown = marks.mark(after.fingerprints[place], NO_REASONING)
    recorded = marks.mark(before.fingerprints[place], NO_REASONING)
    assert marks.difference(shown, recorded) == "content differs"


@given(conversations(), conversations())
def test_different_conversations_differ(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assume([m.get("content") or "" for m in one] != [m.get("content") or "" for m in other])
    texts = [[(m["role"], (m.get("content") or "").rstrip()) for m in messages] for messages in (one, other)]
    assume(texts[0] != texts[1])
    assert digests(one).digests[-1] != digests(other).digests[-1]


def test_tenants_share_no_digest() -> None:
    messages = [{"role": "user", "content": "hi"}]
    one, other = digests(messages, salt=b"a"), digests(messages, salt=b"b")
    assert set(one.digests).isdisjoint(other.digests)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
        ('{"a": 1.0, "b": -0.0}', '{"a": 1, "b": 0}'),
        ('{"a": 1e2}', '{"a": 100}'),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
        ('{"a": "\\/"}', '{"a": "/"}'),
        ('{"a": {"c": [], "b": {}}}', '{"a":{"b":{},"c":[]}}'),
        ("", "{}"),
        ("  ", "{}"),
        ('{"a": Paris', '{"a": Paris\n'),
    ],
)
def test_equal_arguments(one: str, other: str) -> None:
    assert digests([call(one)]).digests == digests([call(other)]).digests


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 0.1}', '{"a": 0.2}'),
        ('{"a": "x "}', '{"a": "x"}'),
        ('"{}"', "{}"),
        ("{'a': 1}", '{"a": 1}'),
    ],
)
def test_different_arguments(one: str, other: str) -> None:
    before, after = digests([call(one)]), digests([call(other)])
    assert before.digests != after.digests
    shown, recorded = (marks.mark(c.fingerprints[0], NO_REASONING) for c in (after, before))
    assert marks.difference(shown, recorded) == "tool calls differ"


def test_the_head_counts() -> None:
    messages = [{"role": "user", "content": "hi"}]
    heads = [
        digests(messages).digests[0],
        digests(messages, tools=(TOOL,)).digests[0],
        digests(messages, effort="low").digests[0],
        digests(messages, thinking=False).digests[0],
    ]
    assert len(set(heads)) == len(heads)
    assert digests(messages, thinking=False, effort="low").digests[0] == heads[3]


def test_key_order_of_tools_does_not_count() -> None:
    messages = [{"role": "user", "content": "hi"}]
    function = TOOL["function"]
    assert isinstance(function, dict)
    reordered = {"function": dict(reversed(function.items())), "type": "function"}
    assert digests(messages, tools=(TOOL,)).digests == digests(messages, tools=(reordered,)).digests


def test_results_count_by_the_call_they_answer() -> None:
    calls = [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in ("a", "b")]
    ask = {"role": "assistant", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": id, "content": id.upper()} for id in ("a", "b")]
    swapped = [{**results[0], "tool_call_id": "b"}, {**results[1], "tool_call_id": "a"}]
    straight = digests([ask, *results])
    assert straight.digests == digests([ask, *reversed(results)]).digests
    assert digests([ask, *reversed(results)]).places == (0, 2, 1)
    assert straight.digests != digests([ask, *swapped]).digests
    assert digests([ask, results[0]]).digests != digests([ask, results[1]]).digests


def test_results_without_ids_count_in_order() -> None:
    ask = call("{}")
    assert (
        digests([ask, {"role": "tool", "content": "x"}]).digests
        == digests([ask, {"role": "tool", "tool_call_id": "a", "content": "x"}]).digests
    )


def test_developer_is_system_and_names_count() -> None:
    def of(**message: Any) -> bytes:
        return digests([{"content": "x", **message}]).digests[-1]

    assert of(role="developer") == of(role="system")
    assert len({of(role="system"), of(role="user"), of(role="user", name="ann")}) == 3


def test_parts_that_are_no_text_count_without_cache_hints() -> None:
    def image(url: str, **more: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}, **more}]}]

    assert digests(image("a")).digests == digests(image("a", cache_control={"type": "ephemeral"})).digests
    assert digests(image("a")).digests != digests(image("b")).digests


@given(VISIBLE_TEXT)
def test_reasoning_is_compared_without_white_space(text: str) -> None:
    def of(reasoning: str | None) -> bytes:
        return reasoning_digest({"role": "assistant", "reasoning_content": reasoning})

    assert of(text) == of(f" {text}\n") == of(text.replace(" ", "\n"))
    assert of(text) != of(text + "x")
    assert of(None) == of(" \n") == NO_REASONING != of(text)


def test_deep_nesting_is_refused_or_taken_as_text() -> None:
    deep = "[" * 100_000
    assert digests([call(deep)]).digests != digests([call(deep[1:])]).digests
    content: list[Any] = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(ValueError, match="messages: nested too deeply"):
        digests([{"role": "user", "content": [{"type": "image", "x": content}]}])
