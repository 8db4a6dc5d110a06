"""Quotas of gateways that share a ledger, a real Redis; and of one whose ledger is away."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
import redis
from conftest import GatewayFactory

from cache_store.ledger import Ledger, new_key
from cache_store.servers import RedisServer
from service.errors import QuotaExceeded, TooManyTurns
from service.metrics import Metrics
from service.quotas import Quotas
from service.tenants import Tenant, Tenants

LEASE_S = 0.2
PATIENCE_S = 30.0
"""With the ledger: a busy machine is not to look like one that is away."""
KEYS = {"x-api-key": "k"}
NOWHERE = "redis://127.0.0.1:9/0"


def some_tenant(**limits: int) -> Tenant:
    return Tenant(f"t-{new_key()[:8]}", **limits)


def kill(quotas: Quotas) -> None:
    """What a kill leaves of a gateway: nobody renews."""
    renewing = quotas._renewing  # pyright: ignore[reportPrivateUsage]
    assert renewing is not None
    renewing.cancel()


class Two:
    """Two gateways' quotas on one ledger; time passes alike for them and for Redis."""

    def __init__(self, held: AsyncExitStack, url: str) -> None:
        self.one, self.other = (self._quotas(held, url) for _ in range(2))

    @staticmethod
    def _quotas(held: AsyncExitStack, url: str) -> Quotas:
        ledger = Ledger(url, deadline_s=PATIENCE_S)
        quotas = Quotas(ledger, Metrics(), lease_s=LEASE_S)
        held.push_async_callback(ledger.close)
        held.push_async_callback(quotas.close)
        return quotas


@pytest_asyncio.fixture
async def two(ledger_server: RedisServer) -> AsyncIterator[Two]:
    async with AsyncExitStack() as held:
        yield Two(held, ledger_server.url)


@pytest_asyncio.fixture
async def alone() -> AsyncIterator[Quotas]:
    """A gateway whose ledger does not answer."""
    ledger, metrics = Ledger(NOWHERE), Metrics()
    quotas = Quotas(ledger, metrics)
    yield quotas
    await quotas.close()
    await ledger.close()


async def test_turns_at_once_are_those_of_all_gateways(two: Two):
    tenant, another = some_tenant(max_concurrent_turns=2), some_tenant(max_concurrent_turns=1)
    first, second = await two.one.begin(tenant), await two.other.begin(tenant)
    for quotas in (two.one, two.other):
        with pytest.raises(TooManyTurns) as caught:
            await quotas.begin(tenant)
        assert caught.value.retry_after_s == 1
    await two.one.begin(another)
    await two.one.end(first, 0)
    await two.one.end(first, 0)
    third = await two.other.begin(tenant)
    with pytest.raises(TooManyTurns):
        await two.one.begin(tenant)
    for hold in (second, third):
        await two.other.end(hold, 0)


async def test_of_many_that_ask_at_once_as_many_begin_as_may(two: Two):
    tenant = some_tenant(max_concurrent_turns=5, requests_per_minute=1000)
    asked = [quotas.begin(tenant) for _ in range(10) for quotas in (two.one, two.other)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, TooManyTurns) for answer in answers) == 15


async def test_the_turns_of_a_killed_gateway_come_back_with_their_leases(two: Two):
    tenant = some_tenant(max_concurrent_turns=1)
    await two.one.begin(tenant)
    kill(two.one)
    await asyncio.sleep(1.2 * LEASE_S)
    await two.other.begin(tenant)


async def test_the_turns_of_a_gateway_that_lives_are_renewed(two: Two, ledger_server: RedisServer):
    tenant = some_tenant(max_concurrent_turns=1)
    hold = await two.one.begin(tenant)
    with redis.Redis(unix_socket_path=str(ledger_server.socket)) as client:

        def ends_at() -> float:
            score = client.zscore(f"longhaul:quota:{tenant.name}:turns", hold.id)
            assert isinstance(score, float)
            return score

        first = ends_at()
        async with asyncio.timeout(10):
            while ends_at() <= first:  # by the gateway itself
                await asyncio.sleep(0.01)


async def test_requests_and_tokens_are_those_of_all_gateways(two: Two):
    tenant = some_tenant(requests_per_minute=3)
    await two.one.end(await two.one.begin(tenant), 0)
    await two.other.end(await two.other.begin(tenant), 0)
    await two.one.take_request(tenant)
    for refused in (two.one.begin(tenant), two.other.begin(tenant), two.other.take_request(tenant)):
        with pytest.raises(QuotaExceeded) as caught:
            await refused
        assert (caught.value.quota, caught.value.retry_after_s) == ("requests_per_minute", 20)
    tenant = some_tenant(tokens_per_minute=600)
    await two.one.end(await two.one.begin(tenant), 1200)
    with pytest.raises(QuotaExceeded) as caught:
        await two.other.begin(tenant)
    assert caught.value.quota == "tokens_per_minute"
    assert caught.value.retry_after_s in (60, 61)


async def test_what_is_refused_takes_nothing(two: Two):
    tenant = some_tenant(max_concurrent_turns=1, requests_per_minute=2)
    hold = await two.one.begin(tenant)
    for _ in range(3):
        with pytest.raises(TooManyTurns):
            await two.other.begin(tenant)
    await two.one.end(hold, 0)
    await two.other.begin(tenant)


async def test_a_bucket_is_filled_again_at_its_rate(two: Two):
    tenant = some_tenant(tokens_per_minute=60_000)
    await two.one.end(await two.one.begin(tenant), 60_030)
    with pytest.raises(QuotaExceeded) as caught:
        await two.other.begin(tenant)
    assert caught.value.retry_after_s == 1
    await asyncio.sleep(0.04)
    await two.other.begin(tenant)


async def test_a_request_that_is_given_up_while_it_is_asked_for_holds_nothing(two: Two):
    tenant = some_tenant(max_concurrent_turns=1)
    for pause_s in (0.0, 0.0005, 0.001, 0.002):
        asking = asyncio.create_task(two.one.begin(tenant))
        await asyncio.sleep(pause_s)
        if asking.cancel():
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            await two.one.end(await asking, 0)
        await asyncio.gather(*two.one._ending)  # pyright: ignore[reportPrivateUsage]
        await two.other.end(await two.other.begin(tenant), 0)


async def test_without_a_ledger_a_gateway_counts_alone(alone: Quotas):
    tenant = some_tenant(max_concurrent_turns=1, requests_per_minute=3, max_turn_bytes=1)
    hold = await alone.begin(tenant)
    with pytest.raises(TooManyTurns):
        await alone.begin(tenant)
    await alone.end(hold, 0)
    await alone.take_request(tenant)
    await alone.end(await alone.begin(tenant), 0)
    with pytest.raises(QuotaExceeded):
        await alone.begin(tenant)


async def test_a_ledger_that_hangs_is_waited_for_once():
    async def swallow(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    ledger = Ledger(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", deadline_s=0.05)
    quotas, tenant = Quotas(ledger, Metrics()), some_tenant(max_concurrent_turns=9)
    started = time.monotonic()
    holds = [await quotas.begin(tenant) for _ in range(9)]
    for hold in holds:
        await quotas.end(hold, 0)
    assert time.monotonic() - started < 0.2
    await quotas.close()
    await ledger.close()
    server.close()


async def test_what_the_ledger_missed_it_is_told_when_it_is_back(two: Two, monkeypatch: pytest.MonkeyPatch):
    tenant = some_tenant(max_concurrent_turns=3, tokens_per_minute=600)
    ended = await two.one.begin(tenant)
    monkeypatch.setattr(two.one, "_away_until_s", time.monotonic() + 0.02)
    unseen = await two.one.begin(tenant)
    await two.one.end(ended, 1200)
    await two.other.end(await two.other.begin(tenant), 0)
    await asyncio.sleep(LEASE_S / 2)
    with pytest.raises(QuotaExceeded):  # the tokens of what has ended
        await two.other.begin(tenant)
    richer = Tenant(tenant.name, max_concurrent_turns=1)
    with pytest.raises(TooManyTurns):  # the turn that began unseen
        await two.other.begin(richer)
    await two.one.end(unseen, 0)
    await two.other.begin(richer)


async def test_without_limits_nothing_is_asked_or_counted(alone: Quotas):
    hold = await alone.begin(some_tenant())
    await alone.take_request(some_tenant())
    await alone.end(hold, 10**9)
    assert alone._metrics.quota_fallbacks._value.get() == 0  # pyright: ignore


async def test_two_gateways_share_a_tenants_turns(gateway_factory: GatewayFactory):
    tenant = some_tenant(max_concurrent_turns=1)
    tenants = Tenants({hashlib.sha256(b"k").digest(): tenant})
    async with gateway_factory(tenants=tenants) as one, gateway_factory(tenants=tenants) as other:
        for gateway in (one, other):
            gateway.service.ledger._deadline_s = PATIENCE_S  # pyright: ignore[reportPrivateUsage]
        messages = [{"role": "user", "content": "Hi"}]
        one.engine.script = one.engine.reply({"content": "Hi"}, delay_s=0.03)
        slow = asyncio.create_task(
            one.http.post("/v1/chat/completions", json={"messages": messages}, headers=KEYS)
        )
        while not one.engine.requests:
            await asyncio.sleep(0.002)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            body = {"max_tokens": 9, "model": "kimi-k3", "messages": messages, "input": "Hi"}
            refused = await other.http.post(path, json=body, headers=KEYS)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        assert (await slow).status_code == 200
        one.engine.script = one.engine.reply({"content": "Hi"})
        for _ in range(5):  # whoever has seen the end may go on at once, at any of them
            for gateway in (one, other):
                body = {"messages": messages, "stream": True}
                async with gateway.http.stream(
                    "POST", "/v1/chat/completions", json=body, headers=KEYS
                ) as answer:
                    assert answer.status_code == 200
                    async for line in answer.aiter_lines():
                        if line == "data: [DONE]":
                            break


async def test_a_client_that_leaves_gives_its_turn_back(gateway_factory: GatewayFactory):
    tenant = some_tenant(max_concurrent_turns=1)
    tenants = Tenants({hashlib.sha256(b"k").digest(): tenant})
    async with gateway_factory(tenants=tenants) as gateway:
        gateway.service.ledger._deadline_s = PATIENCE_S  # pyright: ignore[reportPrivateUsage]
        gateway.engine.script = gateway.engine.reply({"content": "Hi"}, delay_s=10)
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=KEYS) as answer:
            assert answer.status_code == 200
        gateway.engine.script = gateway.engine.reply({"content": "Hi"})
        async with asyncio.timeout(5):
            while (
                await gateway.http.post("/v1/chat/completions", json=body, headers=KEYS)
            ).status_code != 200:
                await asyncio.sleep(0.01)


async def test_nothing_of_an_idle_tenant_stays(two: Two, ledger_server: RedisServer):
    tenant = some_tenant(max_concurrent_turns=1, requests_per_minute=6000, tokens_per_minute=600_000)
    await two.one.end(await two.one.begin(tenant), 10)
    with redis.Redis(unix_socket_path=str(ledger_server.socket)) as client:
        keys = list(client.scan_iter(f"longhaul:quota:{tenant.name}:*"))
        assert len(keys) == 2
        assert all(0 < client.pttl(key) < 2000 for key in keys)  # type: ignore[operator]
