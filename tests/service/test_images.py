"""Images with an engine that sees: what is sent to it. The engine stands in for one with a vision tower."""

from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pytest
import pytest_asyncio
from conftest import Gateway, GatewayFactory
from fake_engine import FakeEngine, listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from model.tokenizer import K3Tokenizer
from service.images import MOST_TOKENS
from service.rendering import IMAGE

ONE, OTHER = (f"data:image/png;base64,{data}" for data in ("iVBORw0KGgo=", "iVBORw0KGgp4"))
CONTEXT_TOKENS = 1 << 16
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class SeeingEngine(FakeEngine):
    """An engine that says it has vision, and a context as long as images are."""

    sees = True

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        super().__init__(tokenizer)
        self.server_info["max_req_input_len"] = CONTEXT_TOKENS - 6

    def app(self) -> Starlette:
        async def model_info(_: Request) -> Response:
            return JSONResponse({"has_image_understanding": self.sees})

        async def models(_: Request) -> Response:
            return JSONResponse({"data": [{"id": "kimi-k3", "max_model_len": CONTEXT_TOKENS}]})

        app = super().app()
        app.router.routes[:0] = [Route("/model_info", model_info), Route("/v1/models", models)]
        return app


@pytest_asyncio.fixture
async def fake_engine(tokenizer: K3Tokenizer) -> AsyncIterator[FakeEngine]:
    engine = SeeingEngine(tokenizer)
    async with listening(engine.app()) as engine.url:
        yield engine


def conversation(path: str, *urls: str) -> dict[str, Any]:
    """A user's message with images between texts, in the terms of the API."""
    if path.endswith("responses"):
        parts: list[Any] = [{"type": "input_image", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "See"}, *parts]}]}
    if path.endswith("messages"):
        sources = [dict(zip(("media_type", "data"), url[5:].split(";base64,"), strict=True)) for url in urls]
        parts = [{"type": "image", "source": {"type": "base64", **source}} for source in sources]
    else:
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, *parts]}],
        "max_tokens": 64,
    }


@pytest.mark.parametrize("path", PATHS)
async def test_images_go_to_the_engine_each_in_its_place(gateway: Gateway, path: str):
    answer = await gateway.http.post(path, json=conversation(path, ONE, OTHER))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-longhaul-images"] == "2"
    request = gateway.engine.requests[-1]
    assert request["image_data"] == [ONE, OTHER]
    assert gateway.service.tokenizer.decode(request["input_ids"]).count(IMAGE) == 2
    assert await gateway.metric("longhaul_images_total") == 2


async def test_the_same_images_are_the_same_over_all_apis(gateway: Gateway):
    prompts: list[Any] = []
    for path in PATHS:
        await gateway.http.post(path, json=conversation(path, ONE, OTHER))
        prompts.append(gateway.engine.requests[-1]["input_ids"])
    assert prompts[0] == prompts[1] == prompts[2]


async def test_a_conversation_with_images_goes_on_exactly(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"reasoning_content": "It is.", "content": "A cat."})
    body = conversation(PATHS[0], ONE)
    first = await gateway.http.post(PATHS[0], json=body)
    message = first.json()["choices"][0]["message"]
    del message["reasoning_content"]
    more = conversation(PATHS[0], OTHER)["messages"]
    messages = [*body["messages"], message, *more]
    second = await gateway.chat(messages=messages)
    assert second.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]
    assert second.headers["x-longhaul-restored"] == "reasoning=1, ids=0"
    before, after = gateway.engine.requests
    assert after["input_ids"][: len(before["input_ids"])] == before["input_ids"]
    assert after["image_data"] == [ONE, OTHER]
    changed = deepcopy(messages)
    changed[0]["content"][1]["image_url"]["url"] = OTHER
    third = await gateway.chat(messages=changed)
    assert "x-longhaul-parent" not in third.headers
    assert gateway.engine.requests[-1]["image_data"] == [OTHER, OTHER]


async def test_results_of_tools_have_images_in_the_order_of_the_calls(gateway: Gateway):
    calls = [
        {"id": id, "type": "function", "function": {"name": "shoot", "arguments": "{}"}} for id in ("a", "b")
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": [{"type": "image_url", "image_url": {"url": url}}]}
        for id, url in (("b", OTHER), ("a", ONE))
    ]
    user = {"role": "user", "content": "Look"}
    answer = await gateway.chat(messages=[user, {"role": "assistant", "tool_calls": calls}, *results])
    assert answer.status_code == 200
    assert gateway.engine.requests[-1]["image_data"] == [ONE, OTHER]


async def test_a_place_that_the_model_sampled_is_no_image(gateway: Gateway):
    tokenizer = gateway.service.tokenizer
    sampled = gateway.engine.reply({"content": "A cat."})
    ids = [id async for event in sampled({}) if not isinstance(event, bytes) for id in event["output_ids"]]
    cat = tokenizer.encode_text("A")[0]
    gateway.engine.script = gateway.engine.sample(
        [piece for id in ids for piece in ((id, tokenizer.markup[IMAGE]) if id == cat else (id,))]
    )
    body = conversation(PATHS[0], ONE)
    first = await gateway.http.post(PATHS[0], json=body)
    message = first.json()["choices"][0]["message"]
    second = await gateway.chat(messages=[*body["messages"], message, {"role": "user", "content": "More"}])
    request = gateway.engine.requests[-1]
    assert request["input_ids"].count(tokenizer.markup[IMAGE]) == len(request["image_data"]) == 1
    assert second.headers["x-longhaul-fallback"] == "image_tokens"


async def test_text_that_spells_a_place_is_text(gateway: Gateway):
    text = f"{IMAGE}<|kimi_image_placeholder|>"
    body = conversation(PATHS[0], ONE)
    body["messages"][0]["content"][0]["text"] = text
    assert (await gateway.http.post(PATHS[0], json=body)).status_code == 200
    request = gateway.engine.requests[-1]
    assert request["input_ids"].count(gateway.service.tokenizer.markup[IMAGE]) == 1
    assert text in gateway.service.tokenizer.decode(request["input_ids"])


async def test_the_engine_says_how_long_the_prompt_is(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"content": "A cat."}, prompt_tokens=1234)
    answer = await gateway.http.post(PATHS[0], json=conversation(PATHS[0], ONE))
    assert answer.json()["usage"]["prompt_tokens"] == 1234
    counted = await gateway.http.post("/v1/messages/count_tokens", json=conversation(PATHS[1], ONE))
    assert MOST_TOKENS < counted.json()["input_tokens"] < MOST_TOKENS + 200


BAD_URLS = (
    "https://example.com/cat.png",
    "file:///etc/passwd",
    "/etc/passwd",
    "data:text/html;base64,QQ==",
    "data:image/png;base64,Q",
    "data:image/png;base64,",
    "data:image/png;base64,QQ==\n/etc/passwd",
)


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_but_an_images_bytes_is_passed_on(gateway: Gateway, path: str):
    for url in BAD_URLS:
        if path.endswith("messages"):
            source: dict[str, Any] = {"type": "url", "url": url}
            body = {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            }
        else:
            body = conversation(path, url)
        answer = await gateway.http.post(path, json=body)
        assert answer.status_code == 400, url
        assert "url" in answer.json()["error"]["message"]
    assert gateway.engine.requests == []


async def test_a_system_message_or_an_answer_has_no_images(gateway: Gateway):
    for role in ("system", "assistant"):
        body = conversation(PATHS[0], ONE)
        body["messages"][0]["role"] = role
        answer = await gateway.http.post(PATHS[0], json=body)
        assert answer.status_code == 400
        assert "of type 'image_url' are not supported here" in answer.json()["error"]["message"]


async def test_an_image_that_the_engine_cannot_read_is_the_clients(gateway: Gateway):
    gateway.engine.status = (
        400,
        {"error": {"message": "Error while loading data: cannot identify image file"}},
    )
    answer = await gateway.http.post(PATHS[0], json=conversation(PATHS[0], ONE))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_image"


async def test_what_is_stored_keeps_its_images(gateway: Gateway):
    first = await gateway.http.post(PATHS[2], json=conversation(PATHS[2], ONE))
    body = {"input": "And now?", "previous_response_id": first.json()["id"]}
    second = await gateway.http.post(PATHS[2], json=body)
    assert second.headers["x-longhaul-images"] == "1"
    assert gateway.engine.requests[-1]["image_data"] == [ONE]
    items = (await gateway.http.get(f"/v1/responses/{first.json()['id']}/input_items")).json()["data"]
    assert items[0]["content"][1] == {"type": "input_image", "image_url": ONE, "detail": "auto"}


async def test_a_stored_image_is_refused_when_no_engine_sees_any_more(
    gateway_factory: GatewayFactory, fake_engine: SeeingEngine
):
    async with gateway_factory() as gateway:
        first = await gateway.http.post(PATHS[2], json=conversation(PATHS[2], ONE))
    fake_engine.sees = False
    async with gateway_factory() as gateway:
        body = {"input": "And now?", "previous_response_id": first.json()["id"]}
        answer = await gateway.http.post(PATHS[2], json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content"
