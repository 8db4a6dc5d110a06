import asyncio
import hashlib
import os
import time
from typing import Any

import pytest
import redis
from conftest import Gateway, GatewayFactory
from hypothesis import given
from hypothesis import strategies as st

from cache_store.allowances import Limits, Refusal
from cache_store.ledger import new_key
from cache_store.retention import TtlClass
from cache_store.roots import Root, root_key, root_page
from cache_store.servers import RedisServer
from service.buckets import LocalCounts
from service.tenants import Tenant, Tenants

USER: list[Any] = [{"role": "user", "content": "Hi"}]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


REQUESTS = Limits(requests_per_minute=6)
TOKENS = Limits(tokens_per_minute=600)


@pytest.fixture
def local(clock: Clock) -> LocalCounts:
    return LocalCounts(clock)


def test_requests_come_at_their_rate_after_a_minutes_worth(local: LocalCounts, clock: Clock):
    def ask(tenant: str = "a") -> Refusal | None:
        if refusal := local.request_refusal(tenant, REQUESTS):
            return refusal
        local.take_request(tenant, REQUESTS)
        return None

    assert [ask() for _ in range(7)] == [None] * 6 + [Refusal("requests_per_minute", 10)]
    assert ask("b") is None
    clock.now_s += 9.9
    assert ask() is not None
    clock.now_s += 0.2
    assert ask() is None
    clock.now_s += 3600
    assert [ask() for _ in range(7)] == [None] * 6 + [Refusal("requests_per_minute", 10)]


def test_tokens_are_charged_afterwards(local: LocalCounts, clock: Clock):
    local.begin("a", TOKENS)
    local.end("a", TOKENS, 1200)
    assert local.turn_refusal("a", TOKENS) == Refusal("tokens_per_minute", 61)
    clock.now_s += 61
    assert local.turn_refusal("a", TOKENS) is None


@given(st.lists(st.tuples(st.integers(1, 10), st.floats(0, 30)), max_size=60))
def test_no_minute_has_more_than_two_minutes_worth(steps: list[tuple[int, float]]):
    """A full bucket and what comes in the meantime: no window of a minute lets more through."""
    clock, limits = Clock(), Limits(requests_per_minute=10)
    local = LocalCounts(clock)
    let_through: list[float] = []
    for wanted, pause_s in steps:
        clock.now_s += pause_s
        for _ in range(wanted):
            if local.request_refusal("a", limits) is None:
                local.take_request("a", limits)
                let_through.append(clock.now_s)
    for start in let_through:
        assert sum(start <= at < start + 60 for at in let_through) <= 20


def test_who_waits_as_told_is_let_in(local: LocalCounts, clock: Clock):
    limits = Limits(requests_per_minute=7, tokens_per_minute=100)
    for tokens in (0, 90, 500, 3, 1):
        waited = 0
        while refusal := local.turn_refusal("a", limits):
            waited += 1
            assert waited <= 2, "once for each quota"
            clock.now_s += refusal.retry_after_s
        local.begin("a", limits)
        local.end("a", limits, tokens)


def limited(**limits: int) -> tuple[Tenants, Tenant]:
    tenant = Tenant(f"t-{new_key()[:8]}", **limits)
    return Tenants({hashlib.sha256(b"k").digest(): tenant}), tenant


async def post(gateway: Gateway, path: str) -> Any:
    body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 99}
    body |= {"input": "Hi"} if path.endswith("responses") else {"messages": USER}
    return await gateway.http.post(path, json=body, headers={"x-api-key": "k"})


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")


async def test_each_api_says_it_in_its_own_shape(gateway_factory: GatewayFactory):
    tenants, tenant = limited(requests_per_minute=1)
    async with gateway_factory(tenants=tenants) as gateway:
        assert (await post(gateway, PATHS[0])).status_code == 200
        for path in PATHS:
            answer = await post(gateway, path)
            assert answer.status_code == 429
            assert 50 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert "requests_per_minute, 1, is used up" in error["message"]
            assert error["type"] in ("rate_limit_error", "rate_limit_exceeded")
            if "messages" in path:
                assert answer.json()["type"] == "error"
                assert answer.json()["request_id"]
            else:
                assert error["code"] == "rate_limit_exceeded"
        name = f'longhaul_refused_total{{quota="requests_per_minute",tenant="{tenant.name}"}}'
        assert await gateway.metric(name) == 4
        assert len(gateway.engine.requests) == 1


async def test_cached_tokens_are_free(gateway_factory: GatewayFactory):
    tenants, tenant = limited(tokens_per_minute=10_000)
    async with gateway_factory(tenants=tenants) as gateway:
        for cached in (0, 5):
            before = level(gateway, tenant)
            script = gateway.engine.reply({"content": "x"}, cached_tokens_details={"storage": cached})
            gateway.engine.script = script
            answer = await post(gateway, "/v1/chat/completions")
            usage = answer.json()["usage"]
            computed = usage["prompt_tokens"] - cached + usage["completion_tokens"]
            assert before - level(gateway, tenant) == pytest.approx(computed, abs=0.5)


def level(gateway: Gateway, tenant: Tenant) -> float:
    clock = Clock()  # no refill between two looks
    local = gateway.service.runner.quotas._local  # pyright: ignore[reportPrivateUsage]
    local.clock = clock
    taken = local._tenants.get(tenant.name)  # pyright: ignore[reportPrivateUsage]
    return taken.tokens.level if taken and taken.tokens else 10_000


async def test_bytes_are_bounded_and_come_back_when_a_session_is_erased(gateway_factory: GatewayFactory):
    tenants, tenant = limited(max_turn_bytes=1)
    async with gateway_factory(tenants=tenants) as gateway:
        gateway.service.runner.quotas._clock = Clock()  # pyright: ignore[reportPrivateUsage]
        headers = {"x-api-key": "k", "x-session-id": "s"}
        body = {"messages": USER}
        assert (await gateway.http.post(PATHS[0], json=body, headers=headers)).status_code == 200
        clock = gateway.service.runner.quotas._clock  # pyright: ignore[reportPrivateUsage]
        assert isinstance(clock, Clock)
        clock.now_s += 10
        answer = await gateway.http.post(PATHS[0], json=body, headers=headers)
        assert answer.status_code == 429
        assert "DELETE /v1/sessions/ID" in answer.json()["error"]["message"]
        assert await gateway.service.ledger.erase_session(tenant.name, "s") == 1
        clock.now_s += 10
        assert (await gateway.http.post(PATHS[0], json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_openais_way_to_keep_a_prefix(gateway: Gateway, path: str):
    headers = {"x-session-id": new_key()}
    for retention, ttl in (("24h", "24h"), ("in_memory", None), (None, None)):
        body: dict[str, Any] = {"prompt_cache_retention": retention}
        body |= {"input": "Hi"} if path.endswith("responses") else {"messages": USER}
        assert (await gateway.http.post(path, json=body, headers=headers)).status_code == 200
        turns = (await gateway.http.get(f"/v1/sessions/{headers['x-session-id']}")).json()["turns"]
        assert turns[-1]["ttl"] == ttl
    body["prompt_cache_retention"] = "1y"
    answer = await gateway.http.post(path, json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_cache_retention"


async def test_the_store_is_told_whose_pages_these_are(
    gateway_factory: GatewayFactory, ledger_server: RedisServer
):
    tenants, tenant = limited(max_cache_bytes=12345)
    async with gateway_factory(tenants=tenants, store_url=f"{ledger_server.url}?db=0") as gateway:
        text = os.urandom(8).hex() + " word" * 80
        cases: list[tuple[Any, TtlClass | None]] = [(None, None), ({"type": "ephemeral", "ttl": "1h"}, "1h")]
        for control, ttl in cases:
            block = {"type": "text", "text": text, "cache_control": control}
            body = {"model": "kimi-k3", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
            answer = await gateway.http.post("/v1/messages", json=body, headers={"x-api-key": "k"})
            assert answer.status_code == 200
            request = gateway.engine.requests[-1]
            page = root_page(request["input_ids"], request["cache_salt"], 64)
            assert page is not None
            async with asyncio.timeout(10):
                while await told(ledger_server, page) != Root(tenant.name, ttl, 12345):
                    await asyncio.sleep(0.01)


async def told(server: RedisServer, page: str) -> Root | None:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        record = client.get(root_key(page))
    assert record is None or isinstance(record, bytes)
    return None if record is None else Root.decode(record)


async def test_a_store_that_is_down_is_nobodys_trouble(gateway_factory: GatewayFactory):
    async with gateway_factory(store_url="redis://203.0.113.1:6379/0") as gateway:
        started = time.monotonic()
        text = "word " * 200
        assert (await gateway.chat(messages=[{"role": "user", "content": text}])).status_code == 200
        assert time.monotonic() - started < 5
