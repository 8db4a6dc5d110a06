"""What tests of Anthropic Messages ask with, and what they read answers by."""

import json
from typing import Any

import pytest
from conftest import Gateway

TOOL: Any = {
    "name": "run",
    "description": "Run it.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
USER: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = {
    "reasoning_content": "Let me think.",
    "content": "I look.",
    "tool_calls": [
        {
            "id": "x",
            "type": "function",
            "function": {"name": "run", "arguments": '{"command": "ls", "n": 1}'},
        },
        {"id": "y", "type": "function", "function": {"name": "run", "arguments": "{}"}},
    ],
}
STREAMING = pytest.mark.parametrize("stream", [False, True])


async def ask(gateway: Gateway, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": "kimi-k3", "max_tokens": 500, "messages": USER, **body}
    return await gateway.http.post("/v1/messages", json=body, headers=headers)


async def answered(gateway: Gateway, **body: Any) -> dict[str, Any]:
    answer = await ask(gateway, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    events: list[dict[str, Any]] = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def prompt_of(gateway: Gateway, **body: Any) -> str:
    """The prompt that a request becomes, as text."""
    gateway.engine.requests.clear()
    await answered(gateway, **body)
    return gateway.engine.tokenizer.decode(gateway.engine.requests[0]["input_ids"])


def the_error(answer: Any, status: int, kind: str) -> str:
    body = answer.json()
    assert answer.status_code == status, body
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "sglang" not in answer.text
    return body["error"]["message"]
