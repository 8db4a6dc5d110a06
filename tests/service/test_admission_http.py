"""Admission before the gateway: what clients see of waiting."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import FakeEngine

from bench.engines import Engine as RunningEngine
from service.admission import AdmissionSettings
from service.admission_places import Room
from service.cli import main
from service.engine import Engine

SIZES = {
    "max_total_num_tokens": 1000,
    "internal_states": [{"max_mamba_cache_size": 6, "effective_max_running_requests_per_dp": 1}],
}
"""An engine that holds the states of one session."""


@pytest.fixture
def small(fake_engine: FakeEngine) -> FakeEngine:
    cast("dict[str, Any]", fake_engine.server_info).update(SIZES)
    return fake_engine


def occupied(engine: FakeEngine) -> asyncio.Event:
    """Let turns run until the event is set."""
    ended = asyncio.Event()
    engine.script = engine.reply({"content": "Hi"}, after=ended)
    return ended


async def busy(gateway: Gateway) -> asyncio.Task[httpx.Response]:
    """A session whose turn runs."""
    running = asyncio.create_task(gateway.chat(session_id="busy"))
    while not gateway.engine.requests:
        await asyncio.sleep(0.005)
    return running


async def until_waiting(gateway: Gateway, count: int) -> None:
    name = f'longhaul_admission_waiting_turns{{engine="{gateway.engine.url.removeprefix("http://")}"}}'
    async with asyncio.timeout(10):
        while await gateway.metric(name) != count:
            await asyncio.sleep(0.01)


async def test_the_room_is_what_the_engine_says(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory() as gateway:
        assert (await gateway.service.engines.info()).room == Room(1000, 6, 1)


@pytest.mark.engine
async def test_sglang_says_the_sizes_of_its_pools(engine: RunningEngine):
    async with Engine(engine.url, vocabulary=8) as client:
        assert (await client.info()).room == Room(262_144, 256, 8)


async def test_a_refused_turn_says_when_to_come_again(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory(admission=AdmissionSettings(wait_s=0.2)) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        for path, status in (("/v1/chat/completions", 503), ("/v1/responses", 503), ("/v1/messages", 529)):
            messages = [{"role": "user", "content": "Hi"}]
            body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 9, "session_id": "other"}
            body |= {"input": "Hi"} if path.endswith("responses") else {"messages": messages}
            answer = await gateway.http.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["type"] == "overloaded_error"
        ended.set()
        assert (await running).status_code == 200
        assert len(small.requests) == 1
        assert await gateway.metric('longhaul_admission_refused_total{tenant="default"}') == 3


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        ("/v1/chat/completions", ": ping"),
        ("/v1/responses", ": ping"),
        ("/v1/messages", "event: ping"),
    ],
)
async def test_a_stream_that_waits_is_pinged(
    small: FakeEngine, gateway_factory: GatewayFactory, path: str, ping: str
):
    options = {"grace_s": 0.05, "ping_interval_s": 0.05}
    settings = AdmissionSettings(hold_s=0)
    async with gateway_factory(admission=settings, **options) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 9, "session_id": "other", "stream": True}
        message = {"role": "user", "content": "Hi"}
        body |= {"input": "Hi"} if path.endswith("responses") else {"messages": [message]}
        async with gateway.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines: list[str] = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if line == ping and not ended.is_set():
                    assert len(small.requests) == 1, "only the busy one runs"
                    ended.set()
        assert ping in lines and not any("error" in line for line in lines if "null" not in line)
        await running
        assert len(small.requests) == 2


async def test_a_client_that_leaves_while_it_waits_is_forgotten(
    small: FakeEngine, gateway_factory: GatewayFactory
):
    async with gateway_factory(admission=AdmissionSettings(hold_s=0)) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        leaving = asyncio.create_task(gateway.chat(session_id="leaving"))
        await until_waiting(gateway, 1)
        leaving.cancel()
        await until_waiting(gateway, 0)
        ended.set()
        await running
        assert (await gateway.chat(session_id="third")).status_code == 200
        assert len(small.requests) == 2 and not small.aborted


async def test_a_client_that_leaves_while_it_is_served_leaves_its_place(
    small: FakeEngine, gateway_factory: GatewayFactory
):
    async with gateway_factory(admission=AdmissionSettings(hold_s=0)) as gateway:
        small.script = small.reply({"content": "word " * 500}, delay_s=0.05)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "session_id": "leaving"}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while "content" not in await anext(lines):
                pass
            waiting = asyncio.create_task(gateway.chat(session_id="next"))
            await until_waiting(gateway, 1)
            small.script = small.reply({"content": "Hi"})
        assert (await waiting).status_code == 200
        assert len(small.aborted) == 1


async def test_a_response_that_waits_can_be_cancelled(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory(admission=AdmissionSettings(), grace_s=0.05) as gateway:
        ended = occupied(small)
        running = await busy(gateway)
        stream = await gateway.openai.responses.create(
            model="kimi-k3", input="Hi", stream=True, prompt_cache_key="other"
        )
        kinds: list[str] = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.created":
                await until_waiting(gateway, 1)
                answer = await gateway.http.post(f"/v1/responses/{event.response.id}/cancel")
                assert answer.json()["status"] == "cancelled"
        assert kinds[-1] == "response.incomplete"
        await until_waiting(gateway, 0)
        ended.set()
        await running
        assert len(small.requests) == 1 and not small.aborted


async def test_without_admission_everybody_goes_at_once(small: FakeEngine, gateway_factory: GatewayFactory):
    async with gateway_factory() as gateway:
        ended = occupied(small)
        turns = [asyncio.create_task(gateway.chat(session_id=f"s{number}")) for number in range(5)]
        async with asyncio.timeout(10):
            while len(small.requests) < 5:
                await asyncio.sleep(0.005)
        ended.set()
        assert {answer.status_code for answer in await asyncio.gather(*turns)} == {200}
        assert "longhaul_admission" not in (await gateway.http.get("/metrics")).text


@pytest.mark.parametrize("option", ["--admission-share=0", "--admission-wait-s=-1"])
def test_settings_out_of_range_are_refused(
    option: str, tokenizer_directory: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["gateway", "--model", str(tokenizer_directory), "--admission", "on", option]
    assert main(arguments) == 2
    assert option.partition("=")[0] in capsys.readouterr().err
