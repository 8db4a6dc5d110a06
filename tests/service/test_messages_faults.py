"""Anthropic Messages: bad requests, an engine that fails or is silent, clients that leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic_messages import STREAMING, TOOL, USER, ask, events_of, the_error
from conftest import Gateway, GatewayFactory
from fake_engine import abort, event

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": [3]}, "messages[0]: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: "),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: "),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9"}]}]},
        "messages[0].content[0].tool_use_id: ",
    ),
    (
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            ]
        },
        "messages[1].content: ends with a tool_use",
    ),
    (
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 3}]},
                *USER,
            ]
        },
        "messages[1].content[0].input: ",
    ),
    ({"system": 3}, "system: "),
    ({"system": [{"type": "image"}]}, "system[0].type: "),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: "),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: "),
    ({"tool_choice": {"type": "any"}}, "tool_choice: "),
    ({"tool_choice": {}}, "tool_choice.type: "),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice.name: "),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": "9"}, "max_tokens: "),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"temperature": "hot"}, "temperature: "),
    ({"thinking": {}}, "thinking.type: "),
    ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens: "),
    ({"output_config": {"effort": "huge"}}, "output_config.effort: "),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: "),
    ({"stream": "yes"}, "stream: "),
    ({"cache_control": {"type": "eternal"}}, "cache_control.type: "),
]


async def test_bad_fields_are_named(gateway: Gateway):
    for body, named in INVALID:
        message = the_error(await ask(gateway, **body), 400, "invalid_request_error")
        assert message.startswith(named), (body, message)
    assert gateway.engine.requests == []


async def test_errors_have_anthropics_shape(gateway: Gateway):
    the_error(await ask(gateway, model="claude-haiku-4-5"), 404, "not_found_error")
    the_error(await gateway.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    the_error(await gateway.http.get("/v1/messages"), 405, "invalid_request_error")
    the_error(await gateway.http.post("/v1/messages/batches"), 404, "not_found_error")
    long = await ask(gateway, messages=[{"role": "user", "content": "x y " * 10_000}])
    message = the_error(long, 400, "invalid_request_error")
    sent, limit = (int(word) for word in message.split() if word.isdecimal())
    assert message == f"prompt is too long: {sent} tokens > {limit} maximum"
    assert sent > limit
    with pytest.raises(anthropic.BadRequestError) as caught:
        await gateway.anthropic.messages.create(model="kimi-k3", max_tokens=0, messages=USER)
    assert "max_tokens: must be between 1" in str(caught.value)
    assert caught.value.request_id


@STREAMING
async def test_a_refusal_before_the_first_token_has_a_status(gateway: Gateway, stream: bool):
    gateway.engine.script = gateway.engine.events(abort(503, "The request queue is full."))
    answer = await ask(gateway, stream=stream)
    the_error(answer, 529, "overloaded_error")
    assert int(answer.headers["retry-after"]) > 0
    gateway.engine.script = gateway.engine.events(abort(500, "x"))
    the_error(await ask(gateway, stream=stream), 502, "api_error")


async def test_an_engine_that_breaks_off_within_a_stream(gateway: Gateway):
    gateway.engine.script = gateway.engine.events(event([5]), event([6]))
    answer = await ask(gateway, stream=True)
    *_, error = events_of(answer.text)
    assert error["type"] == "error"
    assert error["error"]["type"] == "api_error"
    assert error["request_id"] == answer.headers["request-id"]
    with pytest.raises(anthropic.APIStatusError):
        async with gateway.anthropic.messages.stream(model="kimi-k3", max_tokens=9, messages=USER) as stream:
            await stream.get_final_message()


async def test_pings_while_the_engine_is_silent(gateway_factory: GatewayFactory):
    async with gateway_factory(grace_s=0.05, ping_interval_s=0.05) as gateway:
        body = {"model": "kimi-k3", "max_tokens": 900, "messages": USER, "stream": True}
        text = await gateway.pinged("/v1/messages", body, "event: ping\n")
        assert [item["type"] for item in events_of(text)[:3]] == ["ping"] * 3
        async with gateway.anthropic.messages.stream(model="kimi-k3", max_tokens=9, messages=USER) as stream:
            message = await stream.get_final_message()
        assert message.content[0].type == "text"


@STREAMING
async def test_a_client_that_leaves_aborts_the_work(gateway: Gateway, stream: bool):
    gateway.engine.script = gateway.engine.reply({"content": "word " * 500}, size=1, delay_s=0.02)
    body = {"model": "kimi-k3", "max_tokens": 900, "messages": USER, "stream": stream}
    if stream:
        async with gateway.http.stream("POST", "/v1/messages", json=body) as answer:
            await take(answer.aiter_lines(), 20)
    else:
        asking = asyncio.create_task(gateway.http.post("/v1/messages", json=body))
        while not gateway.engine.requests:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        asking.cancel()
    async with asyncio.timeout(10):
        while gateway.engine.aborted != [gateway.engine.requests[0]["rid"]]:
            await asyncio.sleep(0.02)
        while await gateway.metric('longhaul_aborted_turns_total{cause="client"}') != 1:
            await asyncio.sleep(0.02)
    assert await gateway.metric("longhaul_running_turns") == 0


async def take(lines: AsyncIterator[str], count: int) -> None:
    for _ in range(count):
        await anext(lines)
