import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from fake_engine import FakeEngine, listening

from cache_store.servers import RedisServer, Role
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json
from service.app import build_app
from service.gateway import build_service
from service.tenants import Tenants
from service.web import Service


@pytest.fixture(scope="session")
def tokenizer() -> K3Tokenizer:
    return K3Tokenizer.from_json(tokenizer_json())


@pytest.fixture(scope="session")
def ledger_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(Role.LEDGER, tmp_path_factory.mktemp("ledger"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as far as the gateway reads one."""
    path = tmp_path_factory.mktemp("tokenizer_directory")
    (path / "tokenizer.json").write_text(tokenizer_json())
    return path


@pytest_asyncio.fixture
async def fake_engine(tokenizer: K3Tokenizer) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(tokenizer)
    async with listening(engine.app()) as engine.url:
        yield engine


class Gateway:
    """A gateway in front of the stand-in engine, on a real socket, with a real ledger."""

    def __init__(self, engine: FakeEngine, service: Service, url: str) -> None:
        self.engine = engine
        self.service = service
        self.url = url
        # Reading the system's certificates takes longer than most tests.
        self.http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=httpx.AsyncClient(verify=False)
        )
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0)

    async def chat(self, **body: Any) -> httpx.Response:
        """POST a chat request with one user message, unless the body has others."""
        body = {"messages": [{"role": "user", "content": "Hi"}], **body}
        return await self.http.post("/v1/chat/completions", json=body)

    async def pinged(self, path: str, body: Mapping[str, Any], ping: str) -> str:
        """The text of a stream whose engine is silent until `ping` has come three times."""
        pinged = asyncio.Event()
        self.engine.script = self.engine.reply({"content": "Slow."}, after=pinged)
        text = ""
        async with self.http.stream("POST", path, json=body) as answer:
            async for part in answer.aiter_text():
                text += part
                if text.count(ping) >= 3:
                    pinged.set()
        assert pinged.is_set()
        return text

    async def metric(self, name: str) -> float:
        """The value of a series, 0 when it has none."""
        page = (await self.http.get("/metrics")).text
        found = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(f"{name} ")]
        return float(found[0]) if found else 0.0


GatewayFactory = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def gateway_factory(
    fake_engine: FakeEngine, ledger_server: RedisServer, tokenizer_directory: Path
) -> GatewayFactory:
    @asynccontextmanager
    async def start(**options: Any) -> AsyncIterator[Gateway]:
        tenants = options.pop("tenants", Tenants())
        ledger_url = options.pop("ledger_url", f"{ledger_server.url}?db=0")
        service = build_service(
            engine_urls=options.pop("engine_urls", [fake_engine.url]),
            ledger_url=ledger_url,
            model=tokenizer_directory,
            tenants=tenants,
            **options,
        )
        async with listening(build_app(service)) as url:
            gateway = Gateway(fake_engine, service, url)
            while service.watch.verified is None and fake_engine.is_ready:
                await asyncio.sleep(0.005)
            async with gateway.http, gateway.openai, gateway.anthropic:
                yield gateway

    return start


@pytest_asyncio.fixture
async def gateway(gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    async with gateway_factory() as gateway:
        yield gateway
