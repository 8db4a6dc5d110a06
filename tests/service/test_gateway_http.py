import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import CONTEXT_TOKENS, FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.servers import RedisServer
from service.gateway import turn_ttl
from service.tenants import Tenant, Tenants

USER: list[Any] = [{"role": "user", "content": "Hi"}]


def tenants(**keys: Tenant) -> Tenants:
    return Tenants({hashlib.sha256(key.encode()).digest(): tenant for key, tenant in keys.items()})


async def test_models(gateway: Gateway):
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["id"] == "kimi-k3"
    assert model["max_model_len"] == CONTEXT_TOKENS
    assert (await gateway.http.get("/v1/models/kimi-k3")).json() == model
    missing = await gateway.http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert [entry.id for entry in (await gateway.openai.models.list()).data] == ["kimi-k3"]


async def test_one_metrics_page_has_both(gateway: Gateway):
    await gateway.chat()
    page = (await gateway.http.get("/metrics")).text
    assert 'longhaul_requests_total{route="/v1/chat/completions",status="200",tenant="default"} 1.0' in page
    assert "sglang:x 1.0" in page
    assert "longhaul_ttft_seconds_count 1.0" in page


async def test_unknown_paths_and_methods(gateway: Gateway):
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
    ):
        answer = await gateway.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_request_ids(gateway: Gateway):
    own = await gateway.http.get("/health", headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    minted = {(await gateway.http.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(minted) == 2
    odd = await gateway.http.get("/health", headers={"x-request-id": "x" * 200})
    assert odd.headers["x-request-id"] != "x" * 200


async def test_keys(gateway_factory: GatewayFactory):
    async with gateway_factory(tenants=tenants(one=Tenant("a"), two=Tenant("b"))) as gateway:

        async def ask(**headers: str) -> httpx.Response:
            return await gateway.http.post("/v1/chat/completions", json={"messages": USER}, headers=headers)

        assert (await ask(authorization="Bearer one")).status_code == 200
        assert (await ask(**{"x-api-key": "two"})).status_code == 200
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            answer = await ask(**headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await gateway.http.get("/v1/models")).status_code == 401
        for open_route in ("/health", "/ready", "/metrics"):
            assert (await gateway.http.get(open_route)).status_code == 200
        salts = [request["cache_salt"] for request in gateway.engine.requests]
        assert salts == [Tenant("a").cache_salt, Tenant("b").cache_salt]


async def test_no_tenant_continues_anothers_turn(gateway_factory: GatewayFactory):
    async with gateway_factory(tenants=tenants(one=Tenant("a1"), two=Tenant("b1"))) as gateway:

        async def ask(key: str, messages: list[Any]) -> httpx.Response:
            return await gateway.http.post(
                "/v1/chat/completions",
                json={"messages": messages, "session_id": "shared", "cache_salt": "x", "extra_key": "x"},
                headers={"x-api-key": key},
            )

        first = await ask("one", USER)
        history = [*USER, first.json()["choices"][0]["message"], *USER]
        assert "x-longhaul-parent" not in (await ask("two", history)).headers
        assert "x-longhaul-parent" in (await ask("one", history)).headers
        assert {request["cache_salt"] for request in gateway.engine.requests} == {
            Tenant("a1").cache_salt,
            Tenant("b1").cache_salt,
        }


async def test_turns_at_once_are_bounded(gateway_factory: GatewayFactory):
    async with gateway_factory(tenants=tenants(one=Tenant("a", 1))) as gateway:
        gateway.engine.script = gateway.engine.reply({"content": "word " * 50}, size=1, delay_s=0.01)
        headers = {"x-api-key": "one"}
        body = {"messages": USER, "stream": True}
        url = "/v1/chat/completions"
        async with gateway.http.stream("POST", url, json=body, headers=headers) as running:
            second = await gateway.http.post(url, json=body, headers=headers)
            assert second.status_code == 429
            assert second.headers["retry-after"]
            assert second.json()["error"]["type"] == "rate_limit_error"
            await running.aread()
        gateway.engine.script = gateway.engine.reply({"content": "x"})
        assert (await gateway.http.post(url, json=body, headers=headers)).status_code == 200


async def test_bodies_are_bounded(gateway_factory: GatewayFactory):
    async with gateway_factory(max_body_bytes=1000) as gateway:
        whole = await gateway.chat(padding="x" * 1000)
        assert whole.status_code == 413
        assert "1000 bytes" in whole.json()["error"]["message"]

        async def pieces():
            for _ in range(10):
                yield b" " * 500

        assert (await gateway.http.post("/v1/chat/completions", content=pieces())).status_code == 413


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [*USER, {"role": "user", "partial": True}]}, "messages[1].partial"),
    ({"messages": [{"role": "assistant", "partial": True}, *USER]}, "messages[0].partial"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"session_id": 3}, "session_id"),
    ({"prompt_cache_key": []}, "prompt_cache_key"),
]


async def test_errors_name_the_field(gateway: Gateway):
    for body, param in BAD_FIELDS:
        answer = await gateway.chat(**body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)
        assert error["type"] == "invalid_request_error"


async def test_an_unknown_model(gateway: Gateway):
    answer = await gateway.chat(model="gpt-4o")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_unknown_fields_are_ignored(gateway: Gateway):
    answer = await gateway.chat(user="u", metadata={"a": "b"}, store=True, service_tier=None, new_thing=[1])
    assert answer.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.text(max_size=10) | JSON.map(json.dumps)
CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "type": st.just("function") | JSON,
        "function": st.fixed_dictionaries(
            {}, optional={"name": st.text(max_size=5) | JSON, "arguments": ARGUMENTS | JSON}
        )
        | JSON,
    },
)
PART = (
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image_url"]) | JSON, "text": JSON})
    | JSON
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | JSON,
        "content": st.text(max_size=20) | st.lists(PART, max_size=3) | JSON,
        "reasoning_content": JSON,
        "reasoning": JSON,
        "tool_calls": st.lists(CALL, max_size=3) | JSON,
        "tool_call_id": JSON,
        "name": JSON,
        "partial": st.booleans() | JSON,
        "tools": JSON,
    },
)
TOOL = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("function") | JSON,
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", ""]) | JSON}, optional={"parameters": JSON}
        )
        | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional={
        "model": st.just("kimi-k3") | JSON,
        "tools": st.lists(TOOL, max_size=2) | JSON,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | JSON,
        "response_format": st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "json_object", "json_schema"])}, optional={"json_schema": JSON}
        )
        | JSON,
        "stream": st.booleans() | JSON,
        "n": JSON,
        "stop": JSON,
        "max_tokens": JSON,
        "temperature": JSON,
        "logit_bias": JSON,
        "logprobs": JSON,
        "top_logprobs": JSON,
        "reasoning_effort": JSON,
        "thinking": JSON,
        "chat_template_kwargs": JSON,
        "session_id": JSON,
        "prompt_cache_key": JSON,
        "metadata": JSON,
        "user": JSON,
        "parallel_tool_calls": JSON,
    },
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
async def test_no_body_is_a_server_error(gateway: Gateway, data: st.DataObject):
    body = data.draw(
        BODY.map(lambda value: json.dumps(value).encode())
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.binary(max_size=50)
    )
    answer = await gateway.http.post("/v1/chat/completions", content=body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["param"] or error["code"] in ("invalid_json", "context_length_exceeded"), error
    for request in gateway.engine.requests:
        assert request["input_ids"]
        assert max(request["input_ids"]) < gateway.engine.tokenizer.vocab_size
    gateway.engine.requests.clear()


async def test_the_command_drains_on_sigterm(
    fake_engine: FakeEngine, ledger_server: RedisServer, tokenizer_directory: Path, tmp_path: Path
):
    """A stream under way ends well although the gateway was told to stop; then it exits with 0."""
    port = _free_port()
    log = (tmp_path / "log").open("wb")
    arguments = ["--port", str(port), "--engine", fake_engine.url, "--ledger", ledger_server.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "gateway", *arguments, "--model", str(tokenizer_directory)],
        stderr=log,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            await _until_ready(http, process)
            fake_engine.script = fake_engine.reply({"content": "word " * 30}, size=1, delay_s=0.02)
            body = {"messages": USER, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines]
            assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
            assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        log.close()
    access = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (served,) = [line for line in access if line.get("route") == "/v1/chat/completions"]
    assert served["status"] == 200
    assert served["finish"] == "stop"
    assert served["recorded"] is True
    assert {"request_id", "turn", "prompt_tokens", "cached_tokens", "ttft_s", "duration_s", "tenant"} <= set(
        served
    )
    assert "word" not in (tmp_path / "log").read_text()


def test_bad_options_are_refused(
    tokenizer_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from service.cli import main

    assert main(["gateway", "--model", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
    assert (
        main(["gateway", "--model", str(tokenizer_directory), "--tenants", str(tmp_path / "none.toml")]) == 2
    )
    assert main(["gateway", "--model", str(tokenizer_directory), "--ledger", "nonsense"]) == 2
    assert main(["gateway", "--model", str(tokenizer_directory), "--engine", "ftp://x"]) == 2


@pytest.mark.parametrize(
    ("text", "read"),
    [("7d", (None, 604_800)), ("1h=90m", ("1h", 5400)), ("24h=1s", ("24h", 1)), ("5m=2h", ("5m", 7200))],
)
def test_times_to_live_are_read(text: str, read: tuple[str | None, int]):
    assert turn_ttl(text) == read


@pytest.mark.parametrize("text", ["", "d", "0d", "-1d", "1", "1.5h", "7 d", "2h=1d", "=1d", "1h=", "\u0661d"])
def test_times_that_are_none_are_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError):
        turn_ttl(text)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def _until_ready(http: httpx.AsyncClient, process: subprocess.Popen[bytes]) -> None:
    import asyncio

    for _ in range(600):
        assert process.poll() is None, "the gateway ended"
        try:
            if (await http.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway did not get ready")
