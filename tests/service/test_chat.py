import json
from typing import Any

import pytest
from conftest import Gateway
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from service.chat_answer import error_body

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALLS: list[dict[str, Any]] = [
    {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Paris"}'}},
    {
        "id": "y",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"place": "Rome", "n": [1, 2]}'},
    },
]
MESSAGE: dict[str, Any] = {
    "reasoning_content": "Let me\nsee. 你好",
    "content": "Both 👋.",
    "tool_calls": CALLS,
}
USER: list[Any] = [{"role": "user", "content": "Weather?"}]


async def stream(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, each of which is what the openai package understands."""
    chunks: list[dict[str, Any]] = []
    request = {"messages": USER, "stream": True, **body}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=request) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        ChatCompletionChunk.model_validate(chunk, strict=True)
        chunks.append(chunk)
    return chunks


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(
                        {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                    )
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


async def test_a_whole_answer(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(
        MESSAGE, cached_tokens=3, cached_tokens_details={"device": 1, "host": 2}
    )
    answer = await gateway.chat(messages=USER, tools=[WEATHER], model="kimi-k3")
    assert answer.status_code == 200
    body = answer.json()
    ChatCompletion.model_validate(body, strict=True)
    message = body["choices"][0]["message"]
    assert message["content"] == MESSAGE["content"]
    assert message["reasoning_content"] == MESSAGE["reasoning_content"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
        {"place": "Paris"},
        {"place": "Rome", "n": [1, 2]},
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(id.isascii() and id.replace("_", "").isalnum() for id in ids)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    usage = body["usage"]
    sampled = gateway.engine.requests[0]
    assert usage["prompt_tokens"] == len(sampled["input_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 3,
        "cached_tokens_details": {"device": 1, "host": 2, "storage": 0},
    }
    reasoning = len(gateway.engine.tokenizer.encode_text(MESSAGE["reasoning_content"]))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == reasoning


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_a_stream_says_what_the_whole_answer_says(gateway: Gateway, size: int):
    gateway.engine.script = gateway.engine.reply(MESSAGE, size=size)
    whole = (await gateway.chat(messages=USER, tools=[WEATHER])).json()
    chunks = await stream(gateway, tools=[WEATHER], stream_options={"include_usage": True})
    message = whole["choices"][0]["message"]
    streamed = joined(chunks)
    assert streamed["content"] == message["content"]
    assert streamed["reasoning_content"] == message["reasoning_content"]
    assert [call["arguments"] for call in streamed["tool_calls"]] == [
        call["function"]["arguments"] for call in message["tool_calls"]
    ]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert finishes == [None] * (len(finishes) - 1) + ["tool_calls"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_arguments_stream_as_they_are_sampled(gateway: Gateway):
    call = {
        "type": "function",
        "function": {"name": "write", "arguments": json.dumps({"text": "word " * 50})},
    }
    gateway.engine.script = gateway.engine.reply({"tool_calls": [call]}, size=1)
    fragments = [
        part["function"]["arguments"]
        for chunk in await stream(gateway)
        for choice in chunk["choices"]
        for part in choice["delta"].get("tool_calls", [])
    ]
    assert len(fragments) > 20
    assert json.loads("".join(fragments)) == {"text": "word " * 50}


async def test_usage_comes_only_when_it_was_asked_for(gateway: Gateway):
    chunks = await stream(gateway)
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


async def test_the_openai_package_reads_both(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    whole = await gateway.openai.chat.completions.create(model="kimi-k3", messages=USER, tools=[WEATHER])
    assert whole.choices[0].message.content == MESSAGE["content"]
    arguments: dict[int, str] = {}
    text = ""
    chunks = await gateway.openai.chat.completions.create(
        model="kimi-k3", messages=USER, tools=[WEATHER], stream=True
    )
    async for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert text == MESSAGE["content"]
    assert list(arguments.values()) == [
        call.function.arguments
        for call in whole.choices[0].message.tool_calls or []
        if call.type == "function"
    ]


async def test_the_next_turn_continues_the_tokens_of_this_one(gateway: Gateway):
    """Also for a client that drops the reasoning, renames the calls and writes their arguments anew."""
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    first = await gateway.chat(messages=USER, tools=[WEATHER])
    message = first.json()["choices"][0]["message"]
    prompt = gateway.engine.requests[-1]["input_ids"]
    sampled = [id async for event in gateway.engine.script({}) for id in event["output_ids"]]

    kept = [{**message, "role": "assistant"}]
    for number, call in enumerate(message["tool_calls"]):
        kept.append({"role": "tool", "tool_call_id": call["id"], "content": f"sun {number}"})
    altered: list[dict[str, Any]] = json.loads(json.dumps(kept))
    del altered[0]["reasoning_content"]
    for number, call in enumerate(altered[0]["tool_calls"]):
        call["id"] = altered[number + 1]["tool_call_id"] = f"functions_get_weather_{number}"
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), separators=(",", ":"))

    prompts: list[list[int]] = []
    for history, restored in ((kept, "reasoning=0, ids=0"), (altered, "reasoning=1, ids=2")):
        gateway.engine.script = gateway.engine.reply({"content": "Sunny."})
        answer = await gateway.chat(messages=[*USER, *history], tools=[WEATHER])
        assert answer.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]
        assert answer.headers["x-longhaul-continued-tokens"] == str(len(prompt) + len(sampled))
        assert answer.headers["x-longhaul-restored"] == restored
        assert "x-longhaul-fallback" not in answer.headers
        prompts.append(gateway.engine.requests[-1]["input_ids"])
    assert prompts[0] == prompts[1]
    assert prompts[0][: len(prompt) + len(sampled)] == prompt + sampled
    assert await gateway.metric('longhaul_turns_total{origin="continued",tenant="default"}') == 2
    assert await gateway.metric('longhaul_restored_total{what="call_ids"}') == 2


async def test_a_stream_is_recorded_before_its_last_byte(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "One."})
    request = {"messages": USER, "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=request) as answer:
        async for line in answer.aiter_lines():
            if '"finish_reason":"stop"' in line:
                history = [
                    *USER,
                    {"role": "assistant", "content": "One."},
                    {"role": "user", "content": "Two?"},
                ]
                second = await gateway.chat(messages=history)
                assert second.headers["x-longhaul-parent"] == answer.headers["x-longhaul-turn"]
                break
        else:
            pytest.fail("no finish")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stop_string_ends_the_text_and_the_work(gateway: Gateway, streaming: bool):
    message = {
        "reasoning_content": "An END in thought is no stop.",
        "content": "Some text END and more " * 20,
    }
    gateway.engine.script = gateway.engine.reply(message, size=4, delay_s=0.001)
    if streaming:
        chunks = await stream(gateway, stop=["END", "never"])
        streamed = joined(chunks)
        assert streamed["content"] == "Some text "
        assert streamed["reasoning_content"] == message["reasoning_content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = (await gateway.chat(stop="END")).json()["choices"][0]
        assert choice["message"]["content"] == "Some text "
        assert choice["finish_reason"] == "stop"
    sent = gateway.engine.requests[0]
    assert "stop" not in sent["sampling_params"]
    assert gateway.engine.aborted == [sent["rid"]]
    assert await gateway.metric('longhaul_aborted_turns_total{cause="client"}') == 0


async def test_what_stood_before_a_stop_string_is_continued(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "Some text END and more"}, size=1)
    first = await gateway.chat(stop="END")
    text = first.json()["choices"][0]["message"]["content"]
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}, *USER]
    second = await gateway.chat(messages=history)
    assert second.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]


async def test_one_call_only(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(MESSAGE, size=5, delay_s=0.001)
    answer = await gateway.chat(tools=[WEATHER], parallel_tool_calls=False)
    choice = answer.json()["choices"][0]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [
        {"place": "Paris"}
    ]
    assert choice["finish_reason"] == "tool_calls"


async def test_length(gateway: Gateway):
    gateway.engine.script = gateway.engine.sample(
        gateway.engine.tokenizer.encode_text("thinking without an"), finish={"type": "length", "length": 4}
    )
    choice = (await gateway.chat(max_tokens=4)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "thinking without an"


async def test_logprobs_are_those_of_the_text(gateway: Gateway):
    from fake_engine import event, reply_ids

    ids = reply_ids(gateway.engine.tokenizer, {"reasoning_content": "hm", "content": "你好 text"})
    logprobs = [[-0.25 * place, id, None] for place, id in enumerate(ids)]
    tops = [[[-0.5, id, None]] for id in ids]
    gateway.engine.script = gateway.engine.events(
        event(ids, {"type": "stop", "matched": 0}, output_token_logprobs=logprobs, output_top_logprobs=tops)
    )
    choice = (await gateway.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "你好 text"
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in content)
    (chunk,) = [
        chunk
        for chunk in await stream(gateway, logprobs=True, top_logprobs=1)
        if chunk["choices"][0].get("logprobs")
    ]
    assert chunk["choices"][0]["logprobs"]["content"] == content


async def test_limits_are_clamped_to_what_fits(gateway: Gateway):
    await gateway.chat(max_completion_tokens=1_048_576)
    sent = gateway.engine.requests[0]
    assert sent["sampling_params"]["max_new_tokens"] == 4095 - len(sent["input_ids"]) - 1


async def test_thinking_can_be_turned_off(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "Now."}, thinking=False)
    for off in (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
    ):
        message = (await gateway.chat(**off)).json()["choices"][0]["message"]
        assert message["content"] == "Now."
        assert "reasoning_content" not in message


async def test_partial_goes_on_with_the_clients_words(gateway: Gateway):
    ids = gateway.engine.tokenizer.encode_text(" world")
    gateway.engine.script = gateway.engine.sample(ids, finish={"type": "length", "length": 1})
    history = [*USER, {"role": "assistant", "content": "Hello", "partial": True}]
    answer = await gateway.chat(messages=history)
    assert answer.json()["choices"][0]["message"]["content"] == " world"


def test_error_shape():
    from service.errors import ContextTooLong

    body = error_body(ContextTooLong(context_tokens=10, prompt_tokens=11))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == "context_length_exceeded"
