"""Clients that speak Messages, by their recorded requests: what they make of an answer loses nothing.

`recorded/messages.jsonl` holds each client's first two requests, long texts cut. The answer in the second one
came from a recorder. Here it is what the gateway answered, in the form that the client gave the recorder's.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anthropic_messages import events_of
from conftest import Gateway
from fake_engine import FakeEngine

from service.identity import identify

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "recorded/messages.jsonl").read_text().splitlines()
]
CLIENTS = sorted({request["client"] for request in RECORDED})
Blocks = list[dict[str, Any]]


def requests_of(client: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (request for request in RECORDED if request["client"] == client)
    return copy.deepcopy(first), copy.deepcopy(second)


def recorded_answer(body: dict[str, Any]) -> dict[str, Any]:
    return next(message for message in body["messages"] if message["role"] == "assistant")


def k3_message(blocks: Blocks) -> dict[str, Any]:
    """What the model writes for an answer."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for block in blocks:
        if block["type"] == "thinking":
            message["reasoning_content"] = block["thinking"]
        elif block["type"] == "text":
            message["content"] += block["text"]
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            message["tool_calls"].append({"id": "x", "type": "function", "function": function})
    return message


def answer_of(text: str, stream: bool) -> Blocks:
    """The blocks of an answer, as an SDK puts them together."""
    if not stream:
        return json.loads(text)["content"]
    blocks: Blocks = []
    for event in events_of(text):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            name = {
                "thinking_delta": "thinking",
                "text_delta": "text",
                "signature_delta": "signature",
                "input_json_delta": "partial_json",
            }[delta["type"]]
            block["input" if name == "partial_json" else name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(blocks[-1]["input"] or "{}")
    return blocks


def in_the_clients_form(recorded: Blocks, ours: Blocks) -> Blocks:
    """Our blocks with the fields that the client sends of each, in its order."""
    assert [block["type"] for block in recorded] == [block["type"] for block in ours]
    return [{name: mine[name] for name in theirs} for theirs, mine in zip(recorded, ours, strict=True)]


def second_request(client: str, ours: Blocks) -> dict[str, Any]:
    _, second = requests_of(client)
    message = recorded_answer(second["body"])
    message["content"] = in_the_clients_form(message["content"], ours)
    ids = iter(block["id"] for block in message["content"] if block["type"] == "tool_use")
    for later in second["body"]["messages"][second["body"]["messages"].index(message) + 1 :]:
        for block in later["content"]:
            block["tool_use_id"] = next(ids)
    return second


async def post(gateway: Gateway, request: dict[str, Any]) -> Any:
    answer = await gateway.http.post(
        "/v1/messages", json=request["body"], headers={**request["headers"], "x-api-key": "k"}
    )
    assert answer.status_code == 200, answer.text
    return answer


def tokens(engine: FakeEngine, turn: int) -> list[int]:
    return engine.requests[turn]["input_ids"]


def unchanged(blocks: Blocks) -> None:
    """What the client itself does is in the recording."""


def without_thinking(blocks: Blocks) -> None:
    blocks[:] = [block for block in blocks if block["type"] != "thinking"]


def without_signature(blocks: Blocks) -> None:
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = None


def with_a_foreign_signature(blocks: Blocks) -> None:
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = "EpQ" + block["signature"][3:]


def redacted(blocks: Blocks) -> None:
    for block in blocks:
        if block["type"] == "thinking":
            block.clear()
            block |= {"type": "redacted_thinking", "data": "AAAA"}


def with_other_spacing(blocks: Blocks) -> None:
    for block in blocks:
        if block["type"] == "text":
            block["text"] += "\n\n"
        elif block["type"] == "thinking":
            block["thinking"] = f"\n{block['thinking']} "
        else:
            block["input"] = dict(reversed(block["input"].items()))


CHANGES = (
    unchanged,
    without_thinking,
    without_signature,
    with_a_foreign_signature,
    redacted,
    with_other_spacing,
)


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_turn_extends_the_last_one(gateway: Gateway, client: str):
    """Whatever a client does to the answer, prompt 2 begins with all of prompt 1 and that answer."""
    for change in CHANGES:
        await play(gateway, client, change)


async def play(gateway: Gateway, client: str, change: Callable[[Blocks], None]) -> None:
    engine = gateway.engine
    engine.requests.clear()
    first, second = requests_of(client)
    stream = first["body"].get("stream", False)
    wanted = k3_message(recorded_answer(second["body"])["content"])
    engine.script = engine.reply(wanted)
    answer = await post(gateway, first)
    ours = answer_of(answer.text, stream)
    sampled = sampled_ids(engine, wanted)
    following = second_request(client, ours)
    change(recorded_answer(following["body"])["content"])
    answer = await post(gateway, following)
    seen = [*tokens(engine, 0), *sampled]
    assert tokens(engine, 1)[: len(seen)] == seen, change.__name__
    assert "x-longhaul-divergence" not in answer.headers
    dropped = change in (without_thinking, redacted)
    assert answer.headers["x-longhaul-restored"] == f"reasoning={int(dropped)}, ids=0"
    named = identify({name.lower(): value for name, value in first["headers"].items()}, first["body"])
    assert (named is not None) == (client == "claude_code")


def sampled_ids(engine: FakeEngine, message: dict[str, Any]) -> list[int]:
    from fake_engine import reply_ids

    return reply_ids(engine.tokenizer, message)


async def test_claude_codes_billing_header_breaks_nothing(gateway: Gateway):
    """It stands before everything else, and differs from release to release, and from request to request."""
    first, second = requests_of("claude_code")
    wanted = k3_message(recorded_answer(second["body"])["content"])
    gateway.engine.script = gateway.engine.reply(wanted)
    ours = answer_of((await post(gateway, first)).text, True)
    following = second_request("claude_code", ours)
    header = following["body"]["system"][0]
    assert header["text"].startswith("x-anthropic-billing-header")
    header["text"] = "x-anthropic-billing-header: cc_version=9.9.9.zz; cc_entrypoint=cli; cch=12345;"
    await post(gateway, following)
    seen = [*tokens(gateway.engine, 0), *sampled_ids(gateway.engine, wanted)]
    assert tokens(gateway.engine, 1)[: len(seen)] == seen
    assert "billing" not in gateway.engine.tokenizer.decode(tokens(gateway.engine, 1))


async def test_edited_thinking_is_the_clients_own(gateway: Gateway):
    first, second = requests_of("langchain_anthropic")
    wanted = k3_message(recorded_answer(second["body"])["content"])
    gateway.engine.script = gateway.engine.reply(wanted)
    ours = answer_of((await post(gateway, first)).text, False)
    ours[0]["thinking"] = "Something else."
    answer = await post(gateway, second_request("langchain_anthropic", ours))
    assert "reasoning differs" in answer.headers["x-longhaul-divergence"]
    assert answer.headers["x-longhaul-continued-tokens"] == "0"
    assert "Something else." in gateway.engine.tokenizer.decode(tokens(gateway.engine, 1))
