"""Anthropic Messages: effort, thinking, choice of tools, formats and stops, and what becomes of them."""

from typing import Any

import pytest
from anthropic_messages import CALL, STREAMING, TOOL, USER, answered, ask, events_of, prompt_of
from conftest import Gateway


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({"output_config": {"effort": "low"}}, "thinking_effort=low"),
        ({"output_config": {"effort": "medium"}}, "thinking_effort=high"),
        ({"output_config": {"effort": "high"}}, "thinking_effort=high"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "thinking_effort=max"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking_effort=low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking_effort=high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, "thinking_effort=max"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}},
            "thinking_effort=max",
        ),
        ({"thinking": {"type": "adaptive"}}, None),
        ({}, None),
    ],
)
async def test_efforts(gateway: Gateway, body: dict[str, Any], sent: str | None):
    prompt = await prompt_of(gateway, **body)
    assert (sent in prompt) if sent else ("thinking_effort" not in prompt)
    assert prompt.endswith("<|open|>think<|sep|>")


async def test_thinking_can_be_off(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "Hi"}, thinking=False)
    prompt = await prompt_of(gateway, thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert prompt.endswith("<|open|>response<|sep|>")
    assert "thinking_effort" not in prompt


@STREAMING
async def test_thinking_can_be_left_out_and_is_found_again(gateway: Gateway, stream: bool):
    gateway.engine.script = gateway.engine.reply(CALL)
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    if stream:
        async with gateway.anthropic.messages.stream(
            model="kimi-k3", max_tokens=99, messages=USER, thinking=thinking
        ) as events:
            message = await events.get_final_message()
    else:
        message = await gateway.anthropic.messages.create(
            model="kimi-k3", max_tokens=99, messages=USER, thinking=thinking
        )
    block = message.content[0]
    assert block.type == "thinking"
    assert block.thinking == ""
    assert block.signature
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "x"}
        for block in message.content
        if block.type == "tool_use"
    ]
    history: Any = [*USER, message.to_param(), {"role": "user", "content": results}]
    answer = await gateway.anthropic.messages.with_raw_response.create(
        model="kimi-k3", max_tokens=99, messages=history
    )
    assert answer.headers["x-longhaul-restored"] == "reasoning=1, ids=0"
    assert answer.headers["x-longhaul-parent"] == message.id.removeprefix("msg_")


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        (None, False),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "run", "disable_parallel_tool_use": True}, True),
    ],
)
async def test_tool_choice_is_enforced(gateway: Gateway, choice: Any, forced: bool):
    gateway.engine.script = gateway.engine.reply(CALL)
    body = await answered(gateway, tools=[TOOL], tool_choice=choice)
    sampling = gateway.engine.requests[0]["sampling_params"]
    assert ("structural_tag" in sampling) == forced
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    assert len(calls) == (1 if choice and choice.get("disable_parallel_tool_use") else 2)


async def test_one_call_alone(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(CALL, size=1, delay_s=0.01)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = await answered(gateway, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["stop_reason"] == "tool_use"


async def test_json_answers(gateway: Gateway):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    gateway.engine.script = gateway.engine.reply({"content": '{"a": 1}'})
    for body in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        gateway.engine.requests.clear()
        await answered(gateway, **body)
        assert "json_schema" in gateway.engine.requests[0]["sampling_params"]["structural_tag"]


@STREAMING
async def test_stop_sequences(gateway: Gateway, stream: bool):
    gateway.engine.script = gateway.engine.reply({"content": "one two three"}, size=1, delay_s=0.01)
    answer = await ask(gateway, stop_sequences=["two", "never"], stream=stream)
    if stream:
        *_, delta, _ = events_of(answer.text)
        assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    else:
        assert answer.json()["content"] == [{"type": "text", "text": "one "}]
        assert answer.json()["stop_reason"] == "stop_sequence"
        assert answer.json()["stop_sequence"] == "two"
