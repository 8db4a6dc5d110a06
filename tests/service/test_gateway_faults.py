import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import CONTEXT_TOKENS, FakeEngine, abort, event

from cache_store.servers import RedisServer, Role

LEAK = "/usr/lib/python3/site-packages/sglang/srt/x.py: [1, 2, 3] is wrong"
USER: list[Any] = [{"role": "user", "content": "Hi"}]
STREAMING = pytest.mark.parametrize("stream", [False, True])


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)


def the_error(body: dict[str, Any]) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "sglang" not in json.dumps(body)
    return body["error"]


@STREAMING
@pytest.mark.parametrize(
    ("first", "status", "code"),
    [
        (abort(503, "The request queue is full."), 503, "overloaded"),
        (abort(503, LEAK), 503, "engine_unavailable"),
        (abort(400, f"Failed to compile json grammar: {LEAK}"), 400, "invalid_schema"),
        (abort(500, LEAK), 502, "engine_failed"),
        ({"error": {"message": LEAK, "code": 400}}, 502, "engine_failed"),
    ],
)
async def test_a_refusal_before_the_first_token_has_a_status(
    gateway: Gateway, stream: bool, first: Any, status: int, code: str
):
    gateway.engine.script = gateway.engine.events(first)
    answer = await gateway.chat(stream=stream)
    assert answer.status_code == status
    assert the_error(answer.json())["code"] == code
    assert ("retry-after" in answer.headers) == (status >= 500)
    assert answer.headers["x-request-id"]


@STREAMING
async def test_a_prompt_that_does_not_fit(gateway: Gateway, stream: bool):
    answer = await gateway.chat(messages=[{"role": "user", "content": "x y " * 10_000}], stream=stream)
    assert answer.status_code == 400
    error = the_error(answer.json())
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT_TOKENS} tokens" in error["message"]
    assert gateway.engine.requests == []


async def test_no_engine(gateway_factory: GatewayFactory, fake_engine: FakeEngine):
    fake_engine.is_ready = False
    fake_engine.url = "http://127.0.0.1:9"  # discard: nobody listens there
    async with gateway_factory() as gateway:
        answer = await gateway.chat()
        assert answer.status_code == 503
        assert the_error(answer.json())["code"] == "engine_unavailable"
        assert int(answer.headers["retry-after"]) > 0
        assert (await gateway.http.get("/v1/models")).status_code == 503
        assert (await gateway.http.get("/health")).status_code == 200
        ready = await gateway.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["engine"] == {"ready": False}
        assert ready.json()["ledger"] == {"ready": True}
        page = (await gateway.http.get("/metrics")).text
        assert "longhaul_requests_total" in page
        assert "sglang:" not in page


async def test_an_engine_that_breaks_off_within_a_stream(gateway: Gateway):
    gateway.engine.script = gateway.engine.events(event([5]), event([6]))
    answer = await gateway.chat(stream=True)
    assert answer.status_code == 200
    *_, error, done = [line for line in answer.text.splitlines() if line]
    assert done == "data: [DONE]"
    assert the_error(json.loads(error.removeprefix("data: ")))["code"] == "engine_failed"
    assert await gateway.metric('longhaul_aborted_turns_total{cause="engine"}') == 1
    assert await gateway.metric('longhaul_turns_total{origin="fresh",tenant="default"}') == 0


async def test_an_engine_that_breaks_off_within_a_whole_answer(gateway: Gateway):
    gateway.engine.script = gateway.engine.events(event([5]), event([6]))
    answer = await gateway.chat()
    assert answer.status_code == 502
    assert the_error(answer.json())["code"] == "engine_failed"


async def test_pings_while_the_engine_is_silent(gateway_factory: GatewayFactory):
    async with gateway_factory(grace_s=0.05, ping_interval_s=0.05) as gateway:
        request = {"messages": USER, "stream": True}
        text = await gateway.pinged("/v1/chat/completions", request, ": ping\n\n")
        assert text.endswith("data: [DONE]\n\n")
        gateway.engine.script = gateway.engine.reply({"content": "Slow."}, size=1, delay_s=0.1)
        assert ": ping\n\n" in (await gateway.chat(stream=True)).text


async def test_no_ping_before_the_status_is_certain(gateway_factory: GatewayFactory):
    async with gateway_factory(grace_s=10, ping_interval_s=0.02) as gateway:

        async def refuse_late(_: object):
            await asyncio.sleep(0.2)
            yield abort(503, "The request queue is full.")

        gateway.engine.script = refuse_late
        assert (await gateway.chat(stream=True)).status_code == 503


@STREAMING
async def test_a_client_that_leaves_aborts_the_work(gateway: Gateway, stream: bool):
    gateway.engine.script = gateway.engine.reply({"content": "word " * 500}, size=1, delay_s=0.02)
    request = {"messages": USER, "stream": stream}
    if stream:
        async with gateway.http.stream("POST", "/v1/chat/completions", json=request) as answer:
            lines = answer.aiter_lines()
            for _ in range(10):
                await anext(lines)
    else:
        asking = asyncio.create_task(gateway.chat(**request))
        await until(lambda: _truth(len(gateway.engine.requests) == 1))
        await asyncio.sleep(0.1)
        asking.cancel()
    rid = gateway.engine.requests[0]["rid"]
    await until(lambda: _truth(gateway.engine.aborted == [rid]))
    await until(lambda: _truth(gateway.engine.dropped == 1))

    async def counted() -> bool:
        return await gateway.metric('longhaul_aborted_turns_total{cause="client"}') == 1

    await until(counted)
    assert await gateway.metric("longhaul_running_turns") == 0
    assert await gateway.metric('longhaul_turns_total{origin="fresh",tenant="default"}') == 0


async def _truth(value: bool) -> bool:
    return value


async def test_a_client_that_leaves_before_the_first_token(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "x"}, first_delay_s=30)
    asking = asyncio.create_task(gateway.chat(stream=True))
    await until(lambda: _truth(len(gateway.engine.requests) == 1))
    asking.cancel()
    await until(lambda: _truth(gateway.engine.aborted == [gateway.engine.requests[0]["rid"]]))
    series = 'longhaul_requests_total{route="/v1/chat/completions",status="499",tenant="default"}'

    async def counted() -> bool:
        return await gateway.metric(series) == 1

    await until(counted)


async def test_a_client_that_stops_reading_counts_as_gone(gateway_factory: GatewayFactory):
    async with gateway_factory(stall_s=0.3) as gateway:
        # More than the kernel's buffers hold between the two.
        tokenizer = gateway.engine.tokenizer
        plain = (id for id in range(tokenizer.vocab_size) if id not in tokenizer.markup.values())
        longest = max(plain, key=lambda id: len(tokenizer.token_bytes(id)))
        gateway.engine.script = gateway.engine.sample([longest] * 800_000, size=5000)
        address = httpx.URL(gateway.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.host, address.port))
        body = json.dumps({"messages": USER, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)

        async def counted() -> bool:
            return await gateway.metric('longhaul_aborted_turns_total{cause="client"}') == 1

        await until(counted)
        assert gateway.engine.aborted == [gateway.engine.requests[0]["rid"]]
        connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_client_that_stops_sending_is_told_so(gateway_factory: GatewayFactory, path: str):
    async with gateway_factory(stall_s=0.2) as gateway:

        async def stalling():
            yield b'{"messages": '
            await asyncio.sleep(3)  # httpx reads no answer before it has sent all

        answer = await gateway.http.post(path, content=stalling())
        assert answer.status_code == 408
        assert "body" in answer.json()["error"]["message"]
        assert gateway.engine.requests == []


async def test_without_a_ledger_turns_are_served(gateway_factory: GatewayFactory, tmp_path: Path):
    server = RedisServer(Role.LEDGER, tmp_path / "own")
    server.start()
    async with gateway_factory(ledger_url=server.url) as gateway:
        first = await gateway.chat()
        assert "x-longhaul-fallback" not in first.headers
        server.stop()
        history = [*USER, first.json()["choices"][0]["message"], *USER]
        second = await gateway.chat(messages=history)
        assert second.status_code == 200
        assert second.headers["x-longhaul-fallback"] == "ledger_unavailable"
        assert second.headers["x-longhaul-continued-tokens"] == "0"
        assert await gateway.metric('longhaul_fallbacks_total{reason="ledger_unavailable"}') == 1
        assert await gateway.metric("longhaul_ledger_failures_total") == 1
        ready = (await gateway.http.get("/ready")).json()
        assert ready["ready"] is True
        assert ready["ledger"] == {"ready": False}


async def test_another_encoding_is_said_loudly(
    gateway_factory: GatewayFactory, fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    fake_engine.renders_alike = False
    async with gateway_factory() as gateway:
        ready = await gateway.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["encoding"]["verified"] is False
        assert "tools and reasoning" in ready.json()["encoding"]["mismatches"]
        assert await gateway.metric("longhaul_encoding_verified") == 0
    assert "PROMPTS DIFFER" in caplog.text


async def test_a_verified_encoding_is_said_too(gateway: Gateway):
    ready = await gateway.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["encoding"] == {"verified": True, "mismatches": []}
    assert await gateway.metric("longhaul_encoding_verified") == 1


async def test_an_engine_that_comes_back_is_compared_again(
    gateway_factory: GatewayFactory, fake_engine: FakeEngine
):
    fake_engine.is_ready = False
    async with gateway_factory() as gateway:
        ready = await gateway.http.get("/ready")
        assert ready.json()["encoding"] == {"verified": None, "mismatches": []}
        fake_engine.is_ready = True

        async def is_ready() -> bool:
            return (await gateway.http.get("/ready")).status_code == 200

        await until(is_ready)
