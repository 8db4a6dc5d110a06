"""The Responses API over the stand-in engine, read by the openai package."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import abort, event, reply_ids
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from service.tenants import Tenant, Tenants

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}
CALLS: list[dict[str, Any]] = [
    {"id": str(number), "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    for number, arguments in enumerate(('{"place": "Paris"}', '{"place": "Rome", "n": [1, 2]}'))
]
MESSAGE: dict[str, Any] = {
    "reasoning_content": "Let me\nsee. 你好",
    "content": "Both 👋.",
    "tool_calls": CALLS,
}
SEALED = ["reasoning.encrypted_content"]


async def create(gateway: Gateway, **body: Any) -> dict[str, Any]:
    answer = await post(gateway, **body)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


async def post(gateway: Gateway, **body: Any) -> httpx.Response:
    return await gateway.http.post("/v1/responses", json={"input": "Weather?", **body})


async def stream(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream: each as the openai package knows it, numbered from 0, named as its type."""
    request = {"input": "Weather?", "stream": True, **body}
    answer = await gateway.http.post("/v1/responses", json=request)
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for block in answer.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENTS.validate_python(events[-1])
    assert [item["sequence_number"] for item in events] == list(range(len(events)))
    return events


def calls_of(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [item for item in response["output"] if item["type"] == "function_call"]


def outputs(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        for call in calls_of(response)
    ]


def continues(gateway: Gateway, tokens: list[int]) -> bool:
    """Whether the last prompt extends these tokens."""
    return gateway.engine.requests[-1]["input_ids"][: len(tokens)] == tokens


async def seen(gateway: Gateway) -> list[int]:
    """The last prompt and what was sampled behind it."""
    sampled = [id async for item in gateway.engine.script({}) for id in item["output_ids"]]  # type: ignore[index]
    return [*gateway.engine.requests[-1]["input_ids"], *sampled]


async def test_a_whole_response(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(
        MESSAGE, cached_tokens=3, cached_tokens_details={"device": 1, "host": 2}
    )
    body = await create(gateway, tools=[WEATHER], metadata={"a": "b"}, instructions="Be brief.")
    assert body["status"] == "completed"
    assert body["error"] is None
    assert body["metadata"] == {"a": "b"}
    assert body["instructions"] == "Be brief."
    reasoning, message, *calls = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": MESSAGE["reasoning_content"]}]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning
    assert [part["text"] for part in message["content"]] == [MESSAGE["content"]]
    assert [json.loads(call["arguments"]) for call in calls] == [
        {"place": "Paris"},
        {"place": "Rome", "n": [1, 2]},
    ]
    assert len({item["id"] for item in body["output"]} | {call["call_id"] for call in calls}) == 6
    usage = body["usage"]
    assert usage["input_tokens"] == len(gateway.engine.requests[0]["input_ids"])
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    reasoning_tokens = len(gateway.engine.tokenizer.encode_text(MESSAGE["reasoning_content"]))
    assert usage["output_tokens_details"]["reasoning_tokens"] == reasoning_tokens


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_a_stream_is_complete_and_in_order(gateway: Gateway, size: int):
    gateway.engine.script = gateway.engine.reply(MESSAGE, size=size)
    events = await stream(gateway, tools=[WEATHER], include=SEALED)
    kinds = [item["type"].removeprefix("response.") for item in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    response = events[-1]["response"]
    assert [item["output_index"] for item in events if item["type"].endswith("item.done")] == [0, 1, 2, 3]
    for place, shown in enumerate(response["output"]):
        own = [item for item in events if item.get("output_index") == place]
        names = [item["type"].removeprefix("response.") for item in own]
        assert names[0] == "output_item.added"
        assert names[-1] == "output_item.done"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["item"] == shown
        assert own[0]["item"]["id"] == shown["id"]
        assert {item["item_id"] for item in own[1:-1]} == {shown["id"]}
        deltas = "".join(item["delta"] for item in own if item["type"].endswith(".delta"))
        match shown["type"]:
            case "reasoning":
                kind, text, parts = "reasoning_text", shown["content"][0]["text"], True
            case "message":
                kind, text, parts = "output_text", shown["content"][0]["text"], True
            case _:
                kind, text, parts = "function_call_arguments", shown["arguments"], False
        assert deltas == text
        begun, ended = (["content_part.added"], ["content_part.done"]) if parts else ([], [])
        middle = [name for name in names[1:-1] if name != f"{kind}.delta"]
        assert middle == [*begun, f"{kind}.done", *ended]
        done = next(item for item in own if item["type"].endswith(f"{kind}.done"))
        assert done["arguments" if kind.startswith("function") else "text"] == text
    whole = await create(gateway, tools=[WEATHER])
    for response_ in (response, whole):
        for item in response_["output"]:
            for name in ("id", "call_id", "encrypted_content"):
                item.pop(name, None)
    assert response["output"] == whole["output"]
    assert response["usage"] == whole["usage"]


async def test_arguments_stream_as_they_are_sampled(gateway: Gateway):
    call = {
        "type": "function",
        "function": {"name": "write", "arguments": json.dumps({"text": "word " * 50})},
    }
    gateway.engine.script = gateway.engine.reply({"tool_calls": [call]}, size=1)
    deltas = [
        item for item in await stream(gateway) if item["type"] == "response.function_call_arguments.delta"
    ]
    assert len(deltas) > 20


async def test_a_summary_is_shown_where_one_is_asked_for(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply({"reasoning_content": "Hm hm.", "content": "Yes."})
    events = await stream(gateway, reasoning={"summary": "auto", "effort": "high"})
    kinds = [item["type"].removeprefix("response.") for item in events if item.get("output_index") == 0]
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    reasoning = events[-1]["response"]["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm hm."}]
    assert "content" not in reasoning
    tokens = await seen(gateway)
    items = [{"role": "user", "content": "Weather?"}, *events[-1]["response"]["output"]]
    await create(gateway, input=[*items, {"role": "user", "content": "Sure?"}], reasoning={"effort": "high"})
    assert continues(gateway, tokens)


@pytest.mark.parametrize("drop", ["nothing", "reasoning", "ids", "content", "items"])
async def test_a_stateless_client_continues_the_tokens(gateway: Gateway, drop: str):
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    first = await create(gateway, tools=[WEATHER], store=False, include=SEALED)
    tokens = await seen(gateway)
    output: list[dict[str, Any]] = json.loads(json.dumps(first["output"]))
    if drop == "reasoning":
        del output[0]
    if drop == "content":
        del output[0]["content"]  # what is sealed is enough
    if drop == "ids":
        for number, item in enumerate(output):
            item.pop("id")
            if "call_id" in item:
                item["call_id"] = f"functions.get_weather:{number}"
                item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    results = outputs({"output": output})
    history = [{"role": "user", "content": "Weather?"}, *output, *results]
    if drop == "items":
        history.append({"type": "message", "role": "developer", "content": "Now."})
    second = await post(gateway, input=history, tools=[WEATHER], store=False)
    assert second.headers["x-longhaul-parent"] == first["id"].removeprefix("resp_")
    restored = {"reasoning": "reasoning=1, ids=0", "ids": "reasoning=0, ids=2"}
    assert second.headers["x-longhaul-restored"] == restored.get(drop, "reasoning=0, ids=0")
    assert "x-longhaul-divergence" not in second.headers
    assert continues(gateway, tokens)


async def test_what_was_altered_under_the_seal_is_not_taken(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    first = await create(gateway, tools=[WEATHER], store=False, include=SEALED)
    tokens = await seen(gateway)
    reasoning, *rest = first["output"]
    sealed = reasoning["encrypted_content"]
    changed = {
        **reasoning,
        "encrypted_content": sealed[:40] + ("A" if sealed[40] != "A" else "B") + sealed[41:],
    }
    del changed["content"]
    history = [{"role": "user", "content": "Weather?"}, changed, *rest, *outputs(first)]
    second = await post(gateway, input=history, tools=[WEATHER])
    # As good as dropped: the digest proves the turn, and gives its reasoning back.
    assert second.headers["x-longhaul-restored"] == "reasoning=1, ids=0"
    assert continues(gateway, tokens)
    other = {**changed, "content": [{"type": "reasoning_text", "text": "I know better."}]}
    third = await post(
        gateway,
        input=[{"role": "user", "content": "Weather?"}, other, *rest, *outputs(first)],
        tools=[WEATHER],
    )
    assert "reasoning differs" in third.headers["x-longhaul-divergence"]
    assert not continues(gateway, tokens)


async def test_previous_response_id_survives_the_gateway(gateway_factory: GatewayFactory):
    async with gateway_factory() as gateway:
        gateway.engine.script = gateway.engine.reply(MESSAGE)
        first = await create(gateway, tools=[WEATHER], instructions="Be brief.")
        tokens = await seen(gateway)
    async with gateway_factory() as gateway:
        gateway.engine.script = gateway.engine.reply({"content": "Sunny."})
        second = await create(
            gateway,
            tools=[WEATHER],
            instructions="Be brief.",
            previous_response_id=first["id"],
            input=outputs(first),
        )
        assert continues(gateway, tokens)
        tokens = await seen(gateway)
        third = await post(
            gateway,
            tools=[WEATHER],
            instructions="Be brief.",
            previous_response_id=second["id"],
            input="And tomorrow?",
        )
        assert third.headers["x-longhaul-parent"] == second["id"].removeprefix("resp_")
        assert continues(gateway, tokens)
        assert third.json()["previous_response_id"] == second["id"]
        # Instructions are not carried over.
        fourth = await create(gateway, tools=[WEATHER], previous_response_id=second["id"], input="Now?")
        assert fourth["instructions"] is None
        prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
        assert "Be brief." not in prompt
        assert "Weather?" in prompt


async def test_item_references(gateway: Gateway):
    """As the AI SDK sends them: reasoning by reference, the call itself without an id."""
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    first = await create(gateway, tools=[WEATHER])
    tokens = await seen(gateway)
    user = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    reasoning, message, *calls = first["output"]
    bare = [{name: value for name, value in call.items() if name not in ("id", "status")} for call in calls]
    by_id = [{"type": "item_reference", "id": item["id"]} for item in (reasoning, message)]
    answer = await post(gateway, input=[user, *by_id, *bare, *outputs(first)], tools=[WEATHER])
    assert answer.headers["x-longhaul-restored"] == "reasoning=0, ids=0"
    assert continues(gateway, tokens)
    all_by_id = [{"id": item["id"]} for item in first["output"]]
    await create(gateway, input=[user, *all_by_id, *outputs(first)], tools=[WEATHER])
    assert continues(gateway, tokens)
    gone = {"type": "item_reference", "id": f"rs_{'0' * 32}"}
    await create(gateway, input=[user, gone, by_id[1], *bare, *outputs(first)], tools=[WEATHER])
    assert continues(gateway, tokens)
    answer = await post(gateway, input=[user, {"type": "item_reference", "id": f"msg_{'0' * 32}"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1].id"


async def test_a_turn_with_nothing_to_show_is_continued(gateway: Gateway):
    ids = gateway.engine.tokenizer.encode_text("thinking without an")
    gateway.engine.script = gateway.engine.sample(ids, finish={"type": "length", "length": 4})
    first = await create(gateway, max_output_tokens=4)
    assert first["status"] == "incomplete"
    assert first["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
    assert {item["status"] for item in first["output"]} == {"incomplete"}
    tokens = await seen(gateway)
    history = [
        {"role": "user", "content": "Weather?"},
        first["output"][1],
        {"role": "user", "content": "Go on"},
    ]
    await create(gateway, input=history)
    assert continues(gateway, tokens)
    events = await stream(gateway)
    assert events[-1]["type"] == "response.incomplete"


async def test_stored_responses_are_read_listed_and_deleted(gateway: Gateway):
    items = [{"role": "user", "content": f"Number {number}"} for number in range(3)]
    made = await create(gateway, input=items)
    url = f"/v1/responses/{made['id']}"
    assert (await gateway.http.get(url)).json() == made
    page = (await gateway.http.get(f"{url}/input_items", params={"limit": 2, "order": "asc"})).json()
    ResponseItemList.model_validate(page)
    assert [item["content"][0]["text"] for item in page["data"]] == ["Number 0", "Number 1"]
    assert page["has_more"]
    rest = {"after": page["last_id"], "order": "asc"}
    page = (await gateway.http.get(f"{url}/input_items", params=rest)).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["Number 2"]
    assert not page["has_more"]
    for query, param in (({"limit": 0}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order")):
        answer = await gateway.http.get(f"{url}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    cancelled = await gateway.http.post(f"{url}/cancel")
    assert cancelled.status_code == 400
    assert (await gateway.http.delete(url)).json() == {
        "id": made["id"],
        "object": "response",
        "deleted": True,
    }
    for answer in (
        await gateway.http.get(url),
        await gateway.http.delete(url),
        await gateway.http.get(f"{url}/input_items"),
        await gateway.http.post(f"{url}/cancel"),
    ):
        assert answer.status_code == 404
    answer = await post(gateway, previous_response_id=made["id"])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    unkept = await create(gateway, store=False)
    assert (await gateway.http.get(f"/v1/responses/{unkept['id']}")).status_code == 404


async def test_a_response_under_way_can_be_cancelled(gateway: Gateway):
    async def endless(body: Mapping[str, Any]) -> AsyncIterator[Any]:
        word = gateway.engine.tokenizer.encode_text(" word")
        while body["rid"] not in gateway.engine.aborted:
            yield event(word)
            await asyncio.sleep(0.01)
        yield abort(500, "Abort in waiting queue")

    gateway.engine.script = endless
    events: list[dict[str, Any]] = []
    async with gateway.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 6:
                url = f"/v1/responses/{events[0]['response']['id']}/cancel"
                assert (await gateway.http.post(url)).json()["status"] == "cancelled"
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["status"] == "cancelled"
    assert gateway.service.responses.running == {}


async def test_a_failure_within_the_stream_is_its_last_event(gateway: Gateway):
    ids = reply_ids(gateway.engine.tokenizer, {"content": "Some text"})
    gateway.engine.script = gateway.engine.events(event(ids[:8]), abort(500, "/secret/path.py"))
    events = await stream(gateway)
    assert events[-1]["type"] == "response.failed"
    error = events[-1]["response"]["error"]
    assert error["code"] == "server_error"
    assert "secret" not in json.dumps(events)
    assert (await post(gateway)).status_code == 502


async def test_namespaces_and_tools_that_are_left_out(gateway: Gateway):
    """As Codex declares its tools."""
    spawn = {**WEATHER, "name": "spawn"}
    tools = [{"type": "namespace", "name": "agents", "tools": [spawn]}, {"type": "web_search"}, WEATHER]
    call = {"type": "function", "function": {"name": "agents.spawn", "arguments": '{"place": "x"}'}}
    gateway.engine.script = gateway.engine.reply({"tool_calls": [call]})
    answer = await post(gateway, tools=tools)
    assert answer.headers["x-longhaul-left-out"] == "tools[1].type"
    tokens = await seen(gateway)
    (made,) = calls_of(answer.json())
    assert (made["name"], made["namespace"]) == ("spawn", "agents")
    history = [{"role": "user", "content": "Weather?"}, *answer.json()["output"], *outputs(answer.json())]
    assert (await post(gateway, input=history, tools=tools)).status_code == 200
    assert continues(gateway, tokens)


async def test_json_answers_are_enforced(gateway: Gateway):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    chosen = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    body = await create(gateway, text={"format": chosen})
    assert body["text"]["format"] == chosen
    tag = json.loads(gateway.engine.requests[-1]["sampling_params"]["structural_tag"])
    assert json.dumps(schema) in json.dumps(tag)


async def test_log_probabilities(gateway: Gateway):
    ids = reply_ids(gateway.engine.tokenizer, {"reasoning_content": "hm", "content": "你好 text"})
    logprobs = [[-0.25 * place, id, None] for place, id in enumerate(ids)]
    tops = [[[-0.5, id, None]] for id in ids]
    gateway.engine.script = gateway.engine.events(
        event(ids, {"type": "stop", "matched": 0}, output_token_logprobs=logprobs, output_top_logprobs=tops)
    )
    body = await create(gateway, include=["message.output_text.logprobs"], top_logprobs=1)
    part = body["output"][1]["content"][0]
    assert bytes(byte for token in part["logprobs"] for byte in token["bytes"]).decode() == part["text"]
    assert all(len(token["top_logprobs"]) == 1 for token in part["logprobs"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "bot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input[0]",
        ),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"truncation": "middle"}, "truncation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": f"rs_{'0' * 32}"}]}, "input"),
        ({"input": [], "instructions": ""}, "input"),
    ],
)
async def test_bad_fields_are_named(gateway: Gateway, body: dict[str, Any], param: str):
    answer = await post(gateway, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_no_ledger_no_references_but_answers(gateway_factory: GatewayFactory):
    async with gateway_factory(ledger_url="redis://127.0.0.1:1/0") as gateway:
        body = await create(gateway, include=SEALED)
        assert body["store"] is False
        answer = await post(gateway, previous_response_id=f"resp_{'0' * 32}")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "ledger_unavailable"
        assert "retry-after" in answer.headers


async def test_the_openai_package_reads_streams_and_parses(gateway: Gateway):
    gateway.engine.script = gateway.engine.reply(MESSAGE)
    async with gateway.openai.responses.stream(
        model="kimi-k3",
        input="Weather?",
        tools=[WEATHER],  # type: ignore[list-item]
    ) as events:
        async for _ in events:
            pass
        final = await events.get_final_response()
    assert final.output_text == MESSAGE["content"]
    again = await gateway.openai.responses.retrieve(final.id)
    assert [item.id for item in again.output] == [item.id for item in final.output]
    items = await gateway.openai.responses.input_items.list(final.id)
    assert len(items.data) == 1


async def test_tenants_have_nothing_of_each_other(gateway_factory: GatewayFactory):
    keys = {key: Tenant(key) for key in ("one", "two")}
    tenants = Tenants({hashlib.sha256(key.encode()).digest(): tenant for key, tenant in keys.items()})
    async with gateway_factory(tenants=tenants) as gateway:
        gateway.engine.script = gateway.engine.reply(MESSAGE)

        async def ask(key: str, method: str, path: str, **body: Any) -> httpx.Response:
            content = {"json": body} if body else {}
            return await gateway.http.request(method, path, headers={"x-api-key": key}, **content)

        asked = {"input": "Weather?", "tools": [WEATHER], "include": SEALED}
        first = (await ask("one", "POST", "/v1/responses", **asked)).json()
        tokens = await seen(gateway)
        url = f"/v1/responses/{first['id']}"
        for method, path in (
            ("GET", url),
            ("DELETE", url),
            ("GET", f"{url}/input_items"),
            ("POST", f"{url}/cancel"),
        ):
            assert (await ask("two", method, path)).status_code == 404
        by_id = {**asked, "previous_response_id": first["id"]}
        assert (await ask("two", "POST", "/v1/responses", **by_id)).status_code == 400
        message = first["output"][1]["id"]
        referred = [{"role": "user", "content": "Weather?"}, {"type": "item_reference", "id": message}]
        assert (await ask("two", "POST", "/v1/responses", **{**asked, "input": referred})).status_code == 400
        # What is sealed for one is as good as nothing for the other, and so are the ids of its turns.
        del first["output"][0]["content"]
        history = [referred[0], *first["output"], *outputs(first)]
        second = await ask("two", "POST", "/v1/responses", **{**asked, "input": history})
        assert second.headers["x-longhaul-restored"] == "reasoning=0, ids=0"
        assert "x-longhaul-parent" not in second.headers
        assert not continues(gateway, tokens)
        prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
        assert "Let me" not in prompt
        assert (await ask("one", "GET", url)).status_code == 200
