"""Streams of the three APIs, joined into what the same request would have been answered as a whole."""

import json
from collections.abc import Sequence

from bench.recorded_clients import CHAT, MESSAGES, RESPONSES, Json


def joined(path: str, text: str) -> Json:
    """The whole answer of a stream's text, that of an endpoint of `bench.recorded_clients`."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    events: list[Json] = [json.loads(line.removeprefix("data: ")) for line in lines]
    return {CHAT: _chat_joined, RESPONSES: _response_joined, MESSAGES: _message_joined}[path](events)


def _chat_joined(chunks: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({**call, "function": {**call["function"]}})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message}]}


def _response_joined(events: Sequence[Json]) -> Json:
    return events[-1]["response"]


def _message_joined(events: Sequence[Json]) -> Json:
    blocks: list[Json] = []
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] = (block.get(name) or "") + delta[name]
            case _:
                pass
    for place, text in inputs.items():
        blocks[place]["input"] = json.loads(text or "{}")
    return {"role": "assistant", "content": blocks}
