"""Images where the model reads text alone: refused by name, or replaced, and the session goes on."""

from typing import Any

import pytest
from conftest import Gateway, GatewayFactory

from service.images import PLACEHOLDER

URL = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CHAT = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": URL}}]
CASES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT}]}, 1),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 64,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": SOURCE}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [
                                {
                                    "type": "image",
                                    "source": SOURCE,
                                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                                }
                            ],
                        }
                    ],
                },
            ],
        },
        2,
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": URL}],
                },
            ]
        },
        2,
    ),
}
KINDS = {"chat": "image_url", "messages": "image", "responses": "input_image"}
every_api = pytest.mark.parametrize(("path", "body", "images"), CASES.values(), ids=CASES)


@pytest.mark.parametrize("api", CASES)
async def test_an_image_is_refused_by_the_name_of_its_part(gateway: Gateway, api: str):
    path, body, _ = CASES[api]
    kind = KINDS[api]
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 400
    assert f"of type '{kind}' are not supported" in answer.json()["error"]["message"]
    assert gateway.engine.requests == [] and "x-longhaul-replaced-images" not in answer.headers


@every_api
async def test_a_text_stands_in_for_an_image(
    gateway_factory: GatewayFactory, path: str, body: dict[str, Any], images: int
):
    async with gateway_factory(replace_images=True) as gateway:
        answer = await gateway.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-longhaul-replaced-images"] == str(images)
        assert await gateway.metric("longhaul_replaced_images_total") == images
        prompt = gateway.service.tokenizer.decode(gateway.engine.requests[0]["input_ids"])
        assert prompt.count(PLACEHOLDER) == images and "iVBOR" not in prompt


async def test_a_session_with_an_image_goes_on_exactly(gateway_factory: GatewayFactory):
    async with gateway_factory(replace_images=True) as gateway:
        messages: list[dict[str, Any]] = [{"role": "user", "content": CHAT}]
        first = await gateway.chat(messages=messages)
        messages += [first.json()["choices"][0]["message"], {"role": "user", "content": "More"}]
        second = await gateway.chat(messages=messages)
        assert second.headers["x-longhaul-parent"] == first.headers["x-longhaul-turn"]
        before, after = (request["input_ids"] for request in gateway.engine.requests)
        assert after[: len(before)] == before


async def test_what_is_no_image_is_left_alone(gateway_factory: GatewayFactory):
    async with gateway_factory(replace_images=True) as gateway:
        schema = {"type": "object", "properties": {"type": {"enum": ["image"]}}}
        tools = [{"type": "function", "function": {"name": "image", "parameters": schema}}]
        answer = await gateway.chat(tools=tools)
        assert answer.status_code == 200 and "x-longhaul-replaced-images" not in answer.headers
        odd = await gateway.chat(messages=[{"role": "user", "content": [{"type": ["image"]}]}])
        assert odd.status_code == 400
