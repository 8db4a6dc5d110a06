"""Whatever is sent to Messages, it is no server error, and the complaint names the field."""

import json
from typing import Any

import pytest
from conftest import Gateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT = st.sampled_from(("", "x", "user", "assistant", "system", "text", "call_1", "<|open|>", "\ud800", "1h"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
HINT = st.none() | st.just({"type": "ephemeral", "ttl": "1h"}) | JSON
BLOCK = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}, optional={"cache_control": HINT}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXT, "signature": TEXT | JSON}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": TEXT, "name": TEXT},
        optional={"input": JSON, "cache_control": HINT},
    ),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": TEXT}, optional={"content": JSON, "is_error": JSON}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(("redacted_thinking", "image", "document"))}, optional={"data": JSON}
    ),
    JSON,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("user", "assistant", "system")) | JSON,
        "content": TEXT | st.lists(BLOCK, max_size=4) | JSON,
    }
)
TOOLS = st.lists(
    st.just({"name": "run", "input_schema": {"type": "object"}})
    | st.fixed_dictionaries({"name": TEXT | JSON, "input_schema": JSON}, optional={"type": TEXT}),
    max_size=2,
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional={
        "model": st.just("kimi-k3") | JSON,
        "max_tokens": st.integers(-1, 9) | JSON,
        "system": TEXT | st.lists(BLOCK, max_size=2) | JSON,
        "tools": TOOLS | JSON,
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(("auto", "any", "tool", "none"))})
        | JSON,
        "thinking": st.just({"type": "enabled", "budget_tokens": 2000}) | JSON,
        "output_config": JSON,
        "stop_sequences": JSON,
        "temperature": JSON,
        "top_k": JSON,
        "stream": st.booleans() | JSON,
        "metadata": JSON,
        "cache_control": HINT,
        "context_management": JSON,
    },
)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=BODY, counted=st.booleans())
async def test_no_body_is_a_server_error(gateway: Gateway, body: Any, counted: bool):
    path = "/v1/messages/count_tokens" if counted else "/v1/messages"
    content = json.dumps(body).encode()
    answer = await gateway.http.post(path, content=content)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["type"] == "error"
        message = answer.json()["error"]["message"]
        openings = (
            *body,
            "messages",
            "The model",
            "prompt is too long",
            "The request body is not valid JSON",
        )
        assert message.startswith(openings), message
    for request in gateway.engine.requests:
        assert request["input_ids"]
        assert max(request["input_ids"]) < gateway.engine.tokenizer.vocab_size
    gateway.engine.requests.clear()


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"messages": [', b"\xff", b'{"a": ' * 200])
async def test_what_is_no_object_is_refused(gateway: Gateway, content: bytes):
    answer = await gateway.http.post("/v1/messages", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_bodies_are_bounded_in_size_and_depth(gateway: Gateway):
    deep = b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}"
    answer = await gateway.http.post("/v1/messages", content=deep)
    assert answer.status_code == 400
    assert "nested more than 128 levels" in answer.json()["error"]["message"]
    large = b'{"messages": "' + b"x" * (64 << 20) + b'"}'
    answer = await gateway.http.post("/v1/messages", content=large)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"
