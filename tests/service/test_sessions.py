"""Sessions over HTTP: shown, erased, and nobody else's."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Gateway, GatewayFactory

from cache_store.ledger import new_key
from cache_store.servers import RedisServer, Role
from service.tenants import Tenant, Tenants

USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tenants() -> Tenants:
    keys = {"one": Tenant(f"one-{new_key()[:8]}"), "two": Tenant(f"two-{new_key()[:8]}")}
    return Tenants({hashlib.sha256(key.encode()).digest(): tenant for key, tenant in keys.items()})


async def chat(gateway: Gateway, session: str | None, key: str = "one", **body: Any) -> Any:
    headers = {"x-api-key": key} | ({"x-session-id": session} if session else {})
    answer = await gateway.http.post("/v1/chat/completions", json={"messages": USER, **body}, headers=headers)
    assert answer.status_code == 200
    return answer


def message(answer: Any) -> dict[str, Any]:
    return answer.json()["choices"][0]["message"]


async def ask(gateway: Gateway, method: str, session: str, key: str = "one") -> Any:
    return await gateway.http.request(method, f"/v1/sessions/{session}", headers={"x-api-key": key})


async def test_a_session_is_shown_and_erased(gateway_factory: GatewayFactory, tenants: Tenants):
    async with gateway_factory(tenants=tenants) as gateway:
        call = {"id": "x", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        gateway.engine.script = gateway.engine.reply({"content": "x", "tool_calls": [call]})
        first = await chat(gateway, "work/one")
        history = [*USER, message(first), *USER]
        unnamed = await chat(gateway, None, messages=history)
        fork = await chat(gateway, "another", messages=history)
        shown = (await ask(gateway, "GET", "work/one")).json()
        assert shown["id"] == "work/one"
        assert shown["object"] == "session"
        one, two = shown["turns"]
        assert one["id"] == first.headers["x-longhaul-turn"]
        assert two["id"] == unnamed.headers["x-longhaul-turn"]
        assert two["parent"] == one["id"]
        assert one["messages"] == 2
        assert one["tool_calls"] == [{"id": message(first)["tool_calls"][0]["id"], "name": "run"}]
        assert one["finish_reason"] == "tool_calls"
        assert one["prompt_tokens"] == one["added_tokens"] == first.json()["usage"]["prompt_tokens"]
        assert two["added_tokens"] < two["prompt_tokens"]
        assert one["completion_tokens"] == first.json()["usage"]["completion_tokens"]
        for method in ("GET", "DELETE"):
            missing = await ask(gateway, method, "work/one", key="two")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "session_not_found"
            assert (await ask(gateway, method, "work/one", key="wrong")).status_code == 401
            assert (await ask(gateway, method, "work")).status_code == 404
        erased = await ask(gateway, "DELETE", "work/one")
        assert erased.json() == {
            "id": "work/one",
            "object": "session.deleted",
            "deleted": True,
            "turns": 2,
        }
        for method in ("GET", "DELETE"):
            assert (await ask(gateway, method, "work/one")).status_code == 404
        (other,) = (await ask(gateway, "GET", "another")).json()["turns"]
        assert other["id"] == fork.headers["x-longhaul-turn"]
        # Its beginning is gone, so it is rendered as a whole: nothing of what was erased comes back.
        after = await chat(gateway, "another", messages=[*history, message(fork), *USER])
        assert "x-longhaul-parent" not in after.headers
        assert after.headers["x-longhaul-continued-tokens"] == "0"


async def test_stored_responses_go_with_their_session(gateway_factory: GatewayFactory, tenants: Tenants):
    async with gateway_factory(tenants=tenants) as gateway:
        headers = {"x-api-key": "one", "x-session-id": "s"}
        body = {"input": "My name is Ada.", "store": True}
        response = (await gateway.http.post("/v1/responses", json=body, headers=headers)).json()
        path = f"/v1/responses/{response['id']}"
        assert (await gateway.http.get(path, headers=headers)).status_code == 200
        assert (await ask(gateway, "DELETE", "s")).status_code == 200
        assert (await gateway.http.get(path, headers=headers)).status_code == 404


async def test_without_a_ledger_it_is_said(gateway_factory: GatewayFactory, tmp_path: Path):
    server = RedisServer(Role.LEDGER, tmp_path / "own")
    server.start()
    async with gateway_factory(ledger_url=server.url) as gateway:
        await chat(gateway, "s")
        server.stop()
        for method in ("GET", "DELETE"):
            answer = await ask(gateway, method, "s")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "ledger_unavailable"
            assert int(answer.headers["retry-after"]) > 0


async def test_nothing_of_an_erased_session_is_left(gateway_factory: GatewayFactory, tmp_path: Path):
    """A ledger of its own, and every key of it looked at."""
    with RedisServer(Role.LEDGER, tmp_path / "own") as server:
        async with gateway_factory(ledger_url=server.url) as gateway:
            messages = USER
            for _ in range(3):
                answer = await chat(gateway, "s", messages=messages)
                messages = [*messages, message(answer), *USER]
            await gateway.http.post(
                "/v1/messages",
                json={"messages": USER, "max_tokens": 9},
                headers={"x-claude-code-session-id": "s"},
            )
            assert (await ask(gateway, "DELETE", "s")).json()["turns"] == 4
            with redis.Redis(unix_socket_path=str(server.socket)) as client:
                left = {name.decode() for name in client.scan_iter("*")}
                assert {name for name in left if not name.startswith("longhaul:secrets:")} == {
                    "longhaul:stored:default:bytes"
                }
                assert client.get("longhaul:stored:default:bytes") == b"0"
