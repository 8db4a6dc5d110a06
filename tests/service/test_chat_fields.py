"""What the fields of Chat Completions do to the prompt and to the engine's parameters."""

import json
from typing import Any

import pytest
from conftest import Gateway

from model.encoding import conversation_segments
from service.chat_request import EFFORTS

USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def rendered(gateway: Gateway, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    """The prompt as SGLang renders it."""
    return gateway.engine.tokenizer.encode_segments(conversation_segments(messages, **more))


def sent(gateway: Gateway) -> dict[str, Any]:
    return gateway.engine.requests[-1]


@pytest.mark.parametrize(("given", "effort"), EFFORTS.items())
async def test_efforts_are_k3s(gateway: Gateway, given: str, effort: str):
    assert (await gateway.chat(reasoning_effort=given)).status_code == 200
    assert sent(gateway)["input_ids"] == rendered(gateway, [USER], thinking_effort=effort)


async def test_no_effort_is_k3s_default(gateway: Gateway):
    await gateway.chat()
    assert sent(gateway)["input_ids"] == rendered(gateway, [USER])


async def test_assistant_messages_may_follow_each_other(gateway: Gateway):
    messages = [
        USER,
        {"role": "assistant", "content": "One.", "reasoning_content": "First."},
        {"role": "assistant", "content": "Two."},
        {"role": "assistant", "content": None},
        USER,
    ]
    assert (await gateway.chat(messages=messages)).status_code == 200
    assert sent(gateway)["input_ids"] == rendered(gateway, messages)


async def test_a_turn_is_continued_behind_a_message_that_the_client_put_after_it(gateway: Gateway):
    first = await gateway.chat()
    answer = first.json()["choices"][0]["message"]
    answer.pop("reasoning_content", None)
    messages = [USER, answer, {"role": "assistant", "content": "And more."}, USER]
    second = await gateway.chat(messages=messages)
    assert second.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]


async def test_tails_stand_before_the_answer(gateway: Gateway):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    chosen = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await gateway.chat(response_format=chosen)
    assert sent(gateway)["input_ids"] == rendered(gateway, [USER], response_format=chosen)
    assert json.dumps(schema) in json.dumps(json.loads(sent(gateway)["sampling_params"]["structural_tag"]))
    await gateway.chat(response_format={"type": "text"})
    assert "structural_tag" not in sent(gateway)["sampling_params"]


async def test_what_replays_need_goes_to_the_engine(gateway: Gateway):
    await gateway.chat(min_tokens=5, max_tokens=9, ignore_eos=True, seed=7, temperature=0.5, top_p=0.5)
    parameters = sent(gateway)["sampling_params"]
    wanted = {"min_new_tokens": 5, "max_new_tokens": 9, "ignore_eos": True, "sampling_seed": 7}
    assert wanted.items() <= parameters.items()


async def test_the_first_limit_wins(gateway: Gateway):
    await gateway.chat(max_tokens=9, max_completion_tokens=7)
    assert sent(gateway)["sampling_params"]["max_new_tokens"] == 7


@pytest.mark.parametrize("begun", [{"content": "Hello"}, {"content": "", "reasoning_content": "I think"}])
async def test_what_was_partial_is_continued_as_one_message(gateway: Gateway, begun: dict[str, Any]):
    tokenizer = gateway.engine.tokenizer
    ids = [*tokenizer.encode_text(" world"), tokenizer.markup["<|end_of_msg|>"]]
    gateway.engine.script = gateway.engine.sample(ids)
    partial = {"role": "assistant", **begun, "partial": True}
    first = await gateway.chat(messages=[USER, partial])
    said = first.json()["choices"][0]["message"]
    prompt = sent(gateway)["input_ids"]
    if begun["content"]:
        assert said["content"] == " world"
        whole = {"role": "assistant", "content": "Hello world"}
    else:
        assert said["reasoning_content"] == " world"
        whole = {"role": "assistant", "content": ""}
    second = await gateway.chat(messages=[USER, whole, USER])
    assert second.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]
    assert sent(gateway)["input_ids"][: len(prompt) + len(ids)] == [*prompt, *ids]


async def test_several_calls_unless_only_one_is_wanted(gateway: Gateway):
    function = {"name": "f", "arguments": "{}"}
    calls = [{"type": "function", "function": function}] * 2
    gateway.engine.script = gateway.engine.reply({"tool_calls": calls})
    tools = [{"type": "function", "function": {"name": "f"}}]
    for parallel, count in ((True, 2), (None, 2), (False, 1)):
        answer = await gateway.chat(tools=tools, parallel_tool_calls=parallel)
        message = answer.json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == count
        assert message["content"] is None
