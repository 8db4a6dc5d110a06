"""Anthropic Messages over the stand-in engine and a real ledger, asked by the anthropic package and raw."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic_messages import CALL, TOOL, USER, answered, ask, events_of, prompt_of
from conftest import Gateway
from fake_engine import CONTEXT_TOKENS
from pydantic import TypeAdapter

from service.messages_answer import PAGE_TOKENS

EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


async def test_a_whole_answer(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(CALL, cached_tokens_details={"device": 64, "storage": 64})
    body = await answered(gateway, tools=[TOOL], messages=[{"role": "user", "content": "word " * 300}])
    message = Message.model_validate(body)
    thinking, text, first, second = body["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] == "Let me think."
    assert len(thinking["signature"]) == 66
    assert text == {"type": "text", "text": "I look."}
    assert first["input"] == {"command": "ls", "n": 1}
    assert second["input"] == {}
    assert first["id"] != second["id"]
    assert message.stop_reason == "tool_use"
    assert message.stop_sequence is None
    usage = body["usage"]
    assert usage["cache_read_input_tokens"] == 128
    assert usage["cache_creation_input_tokens"] == 0
    prompt = len(gateway.engine.requests[0]["input_ids"])
    assert usage["input_tokens"] + 128 == prompt
    assert usage["output_tokens"] > usage["output_tokens_details"]["thinking_tokens"] > 0


async def test_a_stream_tells_the_same_event_by_event(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(CALL, size=1, cached_tokens_details={"device": 64})
    body = {"tools": [TOOL], "messages": [{"role": "user", "content": "word " * 300}]}
    answer = await ask(gateway, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    for item in events:
        if item["type"] != "ping":
            EVENTS.validate_python(item)
    order = [item["type"].removeprefix("content_block_") for item in events]
    assert order[0] == "message_start"
    assert order[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 64
    starts = [item for item in events if item["type"] == "content_block_start"]
    assert [item["content_block"]["type"] for item in starts] == ["thinking", "text", "tool_use", "tool_use"]
    for index in range(4):
        block = [item["type"] for item in events if item.get("index") == index]
        assert block[0] == "content_block_start"
        assert block[-1] == "content_block_stop"
        assert set(block[1:-1]) == {"content_block_delta"}
    assert [item["index"] for item in events if "index" in item] == sorted(
        item["index"] for item in events if "index" in item
    )
    deltas = [
        item["delta"] for item in events if item["type"] == "content_block_delta" and item["index"] == 0
    ]
    assert deltas[-1]["type"] == "signature_delta"
    assert len([delta for delta in deltas if delta["type"] == "thinking_delta"]) > 3
    parts = [item["delta"]["partial_json"] for item in events if item.get("index") == 2 and "delta" in item]
    assert len(parts) > 3, "arguments stream as they are sampled"
    assert json.loads("".join(parts)) == {"command": "ls", "n": 1}
    whole = await answered(gateway, **body)
    async with gateway.anthropic.messages.stream(model="kimi-k3", max_tokens=500, **body) as stream:
        final = (await stream.get_final_message()).model_dump(mode="json", exclude_none=True)
    for ours, theirs in zip(whole["content"], final["content"], strict=True):
        for changing in ("id", "signature"):
            assert (changing in ours) == (changing in theirs)
            ours.pop(changing, None)
            theirs.pop(changing, None)
        theirs.pop("parsed_output", None)
        assert ours == theirs
    assert final["stop_reason"] == whole["stop_reason"]
    for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert final["usage"][name] == whole["usage"][name]


async def test_tools_results_and_systems_become_what_chat_would_send(gateway: Gateway):
    """The same conversation over both APIs has the same prompt."""
    gateway.engine.script = gateway.engine.reply({"content": "Done."})
    schema = TOOL["input_schema"]
    over_messages = await prompt_of(
        gateway,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0a1b;"},
            {"type": "text", "text": "You are A.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "Be brief."},
        ],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom", "defer_loading": False}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "go "}, {"type": "text", "text": "on"}]},
            {"role": "system", "content": "Now in English."},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "thinking", "thinking": "hm", "signature": "EpQabc"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "run", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": "no"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "file"}, {"type": "text", "text": "s"}],
                    },
                    {"type": "text", "text": "more"},
                ],
            },
        ],
    )
    calls = [
        {"id": id, "type": "function", "function": {"name": "run", "arguments": arguments}}
        for id, arguments in (("a", '{"command":"ls"}'), ("b", ""))
    ]
    gateway.engine.requests.clear()
    function = {"name": "run", "description": "Run it.", "parameters": schema}
    await gateway.chat(
        tools=[{"type": "function", "function": function}],
        messages=[
            {"role": "system", "content": "You are A.\nBe brief."},
            {"role": "user", "content": "go on"},
            {"role": "system", "content": "Now in English."},
            {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "b", "content": "no"},
            {"role": "tool", "tool_call_id": "a", "content": "files"},
            {"role": "user", "content": "more"},
        ],
    )
    over_chat = gateway.engine.tokenizer.decode(gateway.engine.requests[0]["input_ids"])
    assert over_messages == over_chat


async def test_deferred_tools_are_declared_where_they_are_found(gateway: Gateway):
    """The head stays what it was, so the turn before is continued."""
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    deferred = [
        {"name": name, "input_schema": {"type": "object", "title": f"of {name}"}, "defer_loading": True}
        for name in ("fly", "swim", "dig")
    ]
    call = {"id": "x", "type": "function", "function": {"name": "ToolSearch", "arguments": "{}"}}
    gateway.engine.script = gateway.engine.reply({"content": "", "tool_calls": [call]})
    messages: list[Any] = [*USER]
    for names in (("fly",), ("fly", "swim")):
        answer = await ask(gateway, messages=messages, tools=[search, *deferred])
        found = [{"type": "tool_reference", "tool_name": name} for name in names]
        id = answer.json()["content"][-1]["id"]
        result = {"type": "tool_result", "tool_use_id": id, "content": found}
        more = {"type": "text", "text": "go on"}
        messages += [
            {"role": "assistant", "content": answer.json()["content"]},
            {"role": "user", "content": [result, more]},
        ]
    answer = await ask(gateway, messages=messages, tools=[search, *deferred])
    first, second, third = (request["input_ids"] for request in gateway.engine.requests)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert "x-longhaul-divergence" not in answer.headers
    before, after = (gateway.engine.tokenizer.decode(ids) for ids in (first, third))
    assert "of fly" not in before
    assert after.count("of fly") == after.count("of swim") == 1
    assert "of dig" not in after
    assert after.index("of fly") < after.index("go on") < after.index("of swim")


async def test_a_session_goes_on_over_the_other_api(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(CALL)
    text = "Look, and tell me what there is."
    first = await answered(gateway, tools=[TOOL], messages=[{"role": "user", "content": text}])
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    tool = {
        "type": "function",
        "function": {"name": "run", "description": "Run it.", "parameters": TOOL["input_schema"]},
    }
    history = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        *results,
    ]
    second = await gateway.chat(tools=[tool], messages=history)
    assert second.headers["x-longhaul-restored"] == "reasoning=1, ids=0"
    assert second.headers["x-longhaul-parent"] == first["id"].removeprefix("msg_")
    blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in calls]
    third = await ask(
        gateway,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": text},
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": second.json()["choices"][0]["message"]["content"]},
            {"role": "user", "content": "more"},
        ],
    )
    # The second answer had calls, too, and this client has dropped them: its turn does not show what it did.
    assert third.headers["x-longhaul-parent"] == first["id"].removeprefix("msg_")


async def test_why_an_answer_was_cut(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "x"}, size=100, finish={"type": "length"})
    sampled = (await answered(gateway, max_tokens=10**9))["usage"]["output_tokens"]
    assert (await answered(gateway, max_tokens=10**9))["stop_reason"] == "model_context_window_exceeded"
    assert (await answered(gateway, max_tokens=sampled))["stop_reason"] == "max_tokens"
    assert gateway.engine.requests[0]["sampling_params"]["max_new_tokens"] < CONTEXT_TOKENS


async def test_a_call_that_was_cut_has_no_input(gateway: Gateway):
    tokenizer = gateway.engine.tokenizer
    from fake_engine import reply_ids

    ids = reply_ids(tokenizer, CALL)
    end = tokenizer.encode_text("ls")[-1]
    gateway.engine.script = gateway.engine.sample(ids[: ids.index(end)], finish={"type": "length"})
    body = await answered(gateway, tools=[TOOL])
    assert body["content"][-1]["input"] == {}
    answer = await ask(gateway, tools=[TOOL], stream=True)
    assert events_of(answer.text)[-1]["type"] == "message_stop"


async def test_numbers_in_arguments_are_not_changed(gateway: Gateway):
    arguments = '{"big": 123456789012345678901234567890, "exact": 1.10}'
    call = {"id": "x", "type": "function", "function": {"name": "run", "arguments": arguments}}
    gateway.engine.script = gateway.engine.reply({"content": None, "tool_calls": [call]})
    answer = await ask(gateway, tools=[TOOL])
    assert '"big": 123456789012345678901234567890' in answer.text


@pytest.mark.parametrize(
    ("control", "field"),
    [(None, None), ({"type": "ephemeral"}, "5m"), ({"type": "ephemeral", "ttl": "1h"}, "1h")],
)
async def test_cache_counts(gateway: Gateway, control: Any, field: str | None):
    gateway.engine.script = gateway.engine.reply({"content": "x"}, cached_tokens_details={"host": 64})
    block = {"type": "text", "text": "word " * 300, "cache_control": control}
    usage = (await answered(gateway, messages=[{"role": "user", "content": [block]}]))["usage"]
    prompt = len(gateway.engine.requests[0]["input_ids"])
    written = prompt // PAGE_TOKENS * PAGE_TOKENS - 64 if field else 0
    assert usage["cache_read_input_tokens"] == 64
    assert usage["cache_creation_input_tokens"] == written
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": written if field == "5m" else 0,
        "ephemeral_1h_input_tokens": written if field == "1h" else 0,
    }
    assert usage["input_tokens"] + 64 + written == prompt


async def test_tokens_are_counted_as_they_would_be_sent(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(CALL)
    first = await answered(gateway, tools=[TOOL], system="You are A.")
    shown = [block for block in first["content"] if block["type"] != "thinking"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
        for block in shown
        if block["type"] == "tool_use"
    ]
    messages: Any = [
        *USER,
        {"role": "assistant", "content": shown},
        {"role": "user", "content": results},
    ]
    gateway.engine.requests.clear()
    count = await gateway.anthropic.messages.count_tokens(
        model="kimi-k3", messages=messages, tools=[TOOL], system="You are A."
    )
    assert gateway.engine.requests == [], "nothing is generated"
    await answered(gateway, messages=messages, tools=[TOOL], system="You are A.")
    assert count.input_tokens == len(gateway.engine.requests[0]["input_ids"])
    turns = 'longhaul_turns_total{origin="continued",tenant="default"}'
    assert await gateway.metric(turns) == 1


async def test_a_begun_message_is_continued(gateway: Gateway):
    prompt = await prompt_of(
        gateway, messages=[*USER, {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}]
    )
    assert prompt.endswith("The answer")
