"""Several engines behind one gateway: where a session is served, and what happens when its engine is gone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio
from conftest import Gateway, GatewayFactory
from fake_engine import CONTEXT_TOKENS, FakeEngine, abort, listening
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from model.tokenizer import K3Tokenizer
from service.engine import Engine
from service.engine_pages import merge_pages
from service.engines import Engines
from service.metrics import Metrics

URLS = [f"http://engine-{number}:30000" for number in range(4)]


def engines_at(urls: Sequence[str]) -> Engines:
    return Engines([Engine(url, vocabulary=8) for url in urls], Metrics())


def names(engines: Sequence[Engine]) -> list[str]:
    return [engine.name for engine in engines]


@settings(max_examples=50)
@given(key=st.text(), gone=st.sampled_from(URLS), shuffled=st.permutations(URLS))
def test_the_loss_of_an_engine_moves_its_own_sessions_alone(key: str, gone: str, shuffled: list[str]):
    whole = names(engines_at(URLS).order(key))
    assert names(engines_at(shuffled).order(key)) == whole
    rest = names(engines_at([url for url in URLS if url != gone]).order(key))
    assert rest == [name for name in whole if name != Engine(gone, vocabulary=8).name]


def test_sessions_spread_over_the_engines():
    engines = engines_at(URLS)
    homes = [engines.order(f"tenant\0session {number}")[0].name for number in range(1000)]
    assert all(200 < homes.count(engine.name) < 300 for engine in engines.engines)


def test_an_engine_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        engines_at([URLS[0], URLS[1], f"{URLS[0]}/"])


class Replicas:
    """Two stand-in engines, each of which can be ended alone."""

    def __init__(self, engines: list[FakeEngine], lives: list[AsyncExitStack]) -> None:
        self.engines = engines
        self._lives = lives

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    async def end(self, engine: FakeEngine) -> None:
        await self._lives[self.engines.index(engine)].aclose()

    def used(self) -> list[FakeEngine]:
        return [engine for engine in self.engines if engine.requests]

    def other(self, engine: FakeEngine) -> FakeEngine:
        (other,) = (each for each in self.engines if each is not engine)
        return other


@pytest_asyncio.fixture
async def replicas(tokenizer: K3Tokenizer) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as all_lives:
        engines, lives = [FakeEngine(tokenizer), FakeEngine(tokenizer)], list[AsyncExitStack]()
        for engine in engines:
            lives.append(await all_lives.enter_async_context(AsyncExitStack()))
            engine.url = await lives[-1].enter_async_context(listening(engine.app()))
        yield Replicas(engines, lives)


def name(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


async def go_on(gateway: Gateway, messages: list[dict[str, Any]], **body: Any) -> None:
    answer = await gateway.chat(messages=messages, **body)
    assert answer.status_code == 200, answer.text
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize("named", [{"session_id": "s"}, {}])
async def test_a_session_stays_and_moves_with_all_its_tokens(
    gateway_factory: GatewayFactory, replicas: Replicas, named: dict[str, str]
):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin"}]
        for _ in range(4):
            await go_on(gateway, messages, **named)
        (home,) = replicas.used()
        other = replicas.other(home)
        assert await gateway.metric("longhaul_moved_turns_total") == 0
        await replicas.end(home)
        await go_on(gateway, messages, **named)
        await go_on(gateway, messages, **named)
        before, after = home.requests[-1]["input_ids"], other.requests[0]["input_ids"]
        assert after[: len(before)] == before and len(other.requests) == 2
        assert await gateway.metric("longhaul_moved_turns_total") == 2
        assert await gateway.metric(f'longhaul_engine_turns_total{{engine="{name(home)}"}}') == 4
        assert await gateway.metric(f'longhaul_engine_turns_total{{engine="{name(other)}"}}') == 2
        ready = await gateway.http.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["engines"] == {name(home): {"ready": False}, name(other): {"ready": True}}


async def test_a_session_returns_with_its_engine(gateway_factory: GatewayFactory, replicas: Replicas):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin"}]
        await go_on(gateway, messages, session_id="s")
        (home,) = replicas.used()
        home.is_ready = False
        await gateway.http.get("/ready")
        await go_on(gateway, messages, session_id="s")
        assert len(home.requests) == len(replicas.other(home).requests) == 1
        home.is_ready = True
        await gateway.http.get("/ready")
        await go_on(gateway, messages, session_id="s")
        assert len(home.requests) == 2


@pytest.mark.parametrize("refusal", ["The request queue is full.", "Starting"])
async def test_what_an_engine_refuses_unbegun_goes_to_the_next(
    gateway_factory: GatewayFactory, replicas: Replicas, refusal: str
):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin"}]
        await go_on(gateway, messages, session_id="s")
        (home,) = replicas.used()
        home.script = home.events(abort(503, refusal))
        await go_on(gateway, messages, session_id="s")
        assert len(replicas.other(home).requests) == 1
        for engine in replicas.engines:
            engine.script = engine.events(abort(503, refusal))
        assert (await gateway.chat(messages=messages)).status_code == 503


async def test_what_an_engine_died_of_is_given_to_no_other(
    gateway_factory: GatewayFactory, replicas: Replicas
):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        for engine in replicas.engines:
            engine.script = engine.events()  # a stream that ends before its first token
        answer = await gateway.chat()
        assert answer.status_code == 502 and int(answer.headers["retry-after"]) > 0
        assert sum(len(engine.requests) for engine in replicas.engines) == 1


async def test_an_abort_reaches_the_engine_that_works_on_it(
    gateway_factory: GatewayFactory, replicas: Replicas
):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        for engine in replicas.engines:
            engine.script = engine.reply({"content": "word " * 500}, delay_s=0.05)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        (busy,) = replicas.used()
        async with asyncio.timeout(10):
            while not busy.aborted:
                await asyncio.sleep(0.01)
        assert busy.aborted == [busy.requests[0]["rid"]]
        assert replicas.other(busy).aborted == []


async def test_an_engine_that_renders_otherwise_makes_the_gateway_unready(
    gateway_factory: GatewayFactory, replicas: Replicas
):
    replicas.engines[1].renders_alike = False
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        async with asyncio.timeout(10):
            while gateway.service.watch.verified is not False:
                await asyncio.sleep(0.01)
        answer = await gateway.http.get("/ready")
        assert answer.status_code == 503 and answer.json()["encoding"]["mismatches"]


async def test_all_engines_are_on_one_page_of_metrics(gateway_factory: GatewayFactory, replicas: Replicas):
    async with gateway_factory(engine_urls=replicas.urls) as gateway:
        page = (await gateway.http.get("/metrics")).text
        found = [family for family in text_string_to_metric_families(page) if family.name == "sglang:x"]
        assert len(found) == 1
        assert {sample.labels["engine"] for sample in found[0].samples} == set(map(name, replicas.engines))
        await replicas.end(replicas.engines[0])
        page = (await gateway.http.get("/metrics")).text
        assert f'sglang:x{{engine="{name(replicas.engines[1])}"}} 1.0' in page
        assert f'sglang:x{{engine="{name(replicas.engines[0])}"}}' not in page


def test_a_page_that_is_none_leaves_the_others(caplog: pytest.LogCaptureFixture):
    counter = b'# HELP c_total n\n# TYPE c_total counter\nc_total{le="1"} 2.0\n'
    page = merge_pages({"a": counter, "b": b"c_total{ 1\n", "d": counter}).decode()
    assert "engine b" in caplog.text
    assert page.count("# TYPE c_total counter") == 1
    assert 'c_total{engine="a",le="1"} 2.0' in page and 'c_total{engine="d",le="1"} 2.0' in page


async def test_the_smallest_engine_sets_the_limits(replicas: Replicas):
    replicas.engines[0].server_info["max_req_input_len"] = 1000
    engines = engines_at(replicas.urls)
    assert (await engines.info()).max_prompt_tokens == 999
    await replicas.end(replicas.engines[0])
    assert not await engines.engines[0].ready() and await engines.ready()
    assert (await engines.info()).max_prompt_tokens == CONTEXT_TOKENS - 7
    await engines.close()
