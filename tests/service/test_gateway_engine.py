"""The gateway in front of the real engine on this CPU."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anthropic
import httpx
import pytest
import pytest_asyncio
from fake_engine import listening

from cache_store.servers import RedisServer
from service.app import build_app
from service.errors import EngineFailed
from service.gateway import build_service
from service.generation import Generation
from service.tenants import Tenant, Tenants
from service.web import Service

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PAGE_TOKENS = 64
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "mode": {"type": "string", "enum": ["on", "off"]},
                    "level": {"type": "integer", "minimum": 1, "maximum": 9},
                    "quick": {"type": "boolean"},
                },
                "required": ["mode", "level", "quick"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("set_lamp", "set_fan")
]


class Engine(Protocol):
    """What the session's engine fixture offers."""

    url: str


class Gateway:
    """A gateway on a real socket before the real engine. Keys `one` and `two` are those of two tenants."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.http = httpx.AsyncClient(
            base_url=url, timeout=300, trust_env=False, headers={"x-api-key": "one"}
        )

    async def chat(self, text: str = "Hi", *, key: str = "one", **body: Any) -> dict[str, Any]:
        answer = await self.post(text, key=key, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, text: str = "Hi", *, key: str = "one", **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **body}
        return await self.http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})

    async def stream(self, text: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The message that the chunks make up, and the usage."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        answer = await self.post(text, **body)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
        for chunk in chunks[:-1]:
            delta = chunk["choices"][0]["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["calls"]):
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish"] = chunks[-2]["choices"][0]["finish_reason"]
        return message, chunks[-1]["usage"]

    async def engine_metric(self, name: str) -> float:
        page = (await self.http.get("/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


@pytest_asyncio.fixture
async def gateway(engine: Engine, ledger_server: RedisServer, checkpoint: Path) -> AsyncIterator[Gateway]:
    async with start(engine.url, ledger_server.url, checkpoint) as gateway:
        yield gateway


@asynccontextmanager
async def start(engine_url: str, ledger_url: str, checkpoint: Path) -> AsyncIterator[Gateway]:
    # Names that no other run used: their salts part the engine's cache from whatever ran before.
    run = time.time_ns()
    keys = {"one": Tenant(f"one-{run}"), "two": Tenant(f"two-{run}")}
    service = build_service(
        engine_urls=[engine_url],
        ledger_url=ledger_url,
        model=checkpoint,
        tenants=Tenants({hashlib.sha256(key.encode()).digest(): tenant for key, tenant in keys.items()}),
    )
    async with listening(build_app(service)) as url:
        gateway = Gateway(service, url)
        while service.watch.verified is None:
            await asyncio.sleep(0.05)
        async with gateway.http:
            yield gateway


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole answer's message in the form of `Gateway.stream`."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "calls": [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls") or []
        ],
        "finish": choice["finish_reason"],
    }


async def test_the_engine_renders_the_same_prompts(gateway: Gateway):
    ready = (await gateway.http.get("/ready")).json()
    assert list(ready.pop("engines").values()) == [{"ready": True}]
    assert ready == {
        "ready": True,
        "engine": {"ready": True},
        "encoding": {"verified": True, "mismatches": []},
        "ledger": {"ready": True},
    }


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_stream_says_what_the_whole_answer_says(gateway: Gateway, thinking: bool):
    options = {"max_tokens": 60, "chat_template_kwargs": {"thinking": thinking}}
    whole = await gateway.chat("Tell me", **options)
    streamed, usage = await gateway.stream("Tell me", **options)
    assert streamed == flat(whole["choices"][0])
    assert streamed["content"] or streamed["reasoning_content"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("thinking", [True, False])
async def test_a_forced_call_is_made(gateway: Gateway, thinking: bool, temperature: int):
    """In turns of different shapes, one after the other: none may spoil the next one's grammar."""
    options = {"tools": TOOLS, "chat_template_kwargs": {"thinking": thinking}, "temperature": temperature}
    named = {"type": "function", "function": {"name": "set_fan"}}
    for choice, parallel in (("required", False), (named, False), ("required", True), (named, False)):
        body = {
            **options,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "max_tokens": 400,
            "seed": 3,
        }
        message, usage = await gateway.stream("Do it", **body)
        if not parallel:  # random weights need not come to an end of many calls
            assert message["finish"] == "tool_calls"
            assert len(message["calls"]) == 1
        assert message["content"] == ""
        for name, text in message["calls"][: None if message["finish"] == "tool_calls" else -1]:
            assert name == "set_fan" if choice is named else name in ("set_lamp", "set_fan")
            arguments = json.loads(text)
            assert arguments.keys() == {"mode", "level", "quick"}
            assert arguments["mode"] in ("on", "off")
            assert 1 <= arguments["level"] <= 9
            assert isinstance(arguments["quick"], bool)
        if thinking:
            assert usage["completion_tokens_details"]["reasoning_tokens"] <= 200


async def test_json_answers(gateway: Gateway):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for thinking in (True, False):
        answer = await gateway.chat(
            "How many?",
            response_format=response_format,
            max_tokens=200,
            chat_template_kwargs={"thinking": thinking},
        )
        assert answer["choices"][0]["finish_reason"] == "stop"
        found = json.loads(answer["choices"][0]["message"]["content"])
        assert found.keys() == {"n", "ok"}
        assert 0 <= found["n"] <= 99


async def test_a_schema_without_a_grammar_is_the_clients_fault(gateway: Gateway):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await gateway.post(response_format=response_format, max_tokens=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_schema"
    assert await gateway.chat(max_tokens=2)


async def test_every_turn_takes_the_last_one_from_the_cache(gateway: Gateway):
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Read this: " + "the cat sat on the mat. " * 20}
    ]
    previous = 0
    for turn in range(4):
        answer = await gateway.chat(messages=messages, max_tokens=40, ignore_eos=True)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(usage["prompt_tokens_details"]["cached_tokens_details"].values()) == cached
        if turn:
            # States are kept at page borders: the last page of what was seen is computed again.
            assert cached >= previous // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
        else:
            assert cached == 0
        previous = usage["prompt_tokens"]
        message = {**answer["choices"][0]["message"]}
        message.pop("reasoning_content", None)
        messages += [message, {"role": "user", "content": f"And then, number {turn}?"}]


async def test_tenants_share_no_cache(gateway: Gateway):
    text = "Secret: " + "we move at dawn, all of us. " * 20

    async def cached(key: str) -> int:
        usage = (await gateway.chat(text, key=key, max_tokens=1))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached("one") == 0
    assert await cached("two") == 0
    assert await cached("one") >= PAGE_TOKENS


async def test_a_wrong_key_gets_nothing(gateway: Gateway):
    before = await gateway.engine_metric("sglang:num_requests_total")
    assert (await gateway.post(key="three")).status_code == 401
    assert await gateway.engine_metric("sglang:num_requests_total") == before


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(gateway: Gateway, stream: bool):
    body = {
        "messages": [{"role": "user", "content": "Go on"}],
        "max_tokens": 5000,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(10):
                await anext(lines)
    else:
        asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
        deadline = time.monotonic() + 30
        while await gateway.engine_metric("sglang:num_running_reqs") < 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        asking.cancel()
    left_at = time.monotonic()
    while await gateway.engine_metric("sglang:num_running_reqs"):
        assert time.monotonic() < left_at + 10, "the engine goes on for nobody"
        await asyncio.sleep(0.05)
    assert await gateway.chat(max_tokens=2)


async def test_an_id_outside_the_vocabulary_never_arrives(gateway: Gateway):
    vocabulary = gateway.service.tokenizer.vocab_size
    for bad in (-1, vocabulary, 2**31):
        generation = Generation("r", [1, bad], {"max_new_tokens": 1}, "salt")
        with pytest.raises(EngineFailed):
            async for _ in gateway.service.engines.engines[0].generate(generation):
                pass
    last = Generation("r", [vocabulary - 1], {"max_new_tokens": 1}, "salt")
    assert [chunk async for chunk in gateway.service.engines.engines[0].generate(last)]
    assert await gateway.chat(max_tokens=2)


async def test_the_context_is_used_up_to_its_end_and_no_further(gateway: Gateway):
    info = await gateway.service.engines.info()
    answer = await gateway.post("x y " * 20_000)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {info.context_tokens} tokens" in error["message"]
    # The longest prompt that the gateway lets through is one that the engine takes.
    longest = Generation(
        "long", [5] * info.max_prompt_tokens, {"max_new_tokens": 2, "ignore_eos": True}, "salt"
    )
    chunks = [chunk async for chunk in gateway.service.engines.engines[0].generate(longest)]
    assert chunks[-1].stop == "length"
    assert sum(len(chunk.ids) for chunk in chunks) == 2


async def test_limits_beyond_the_context_are_clamped(gateway: Gateway):
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 1_048_576,
        "stream": True,
    }
    options = {"top_k": 5, "min_p": 0.01, "presence_penalty": 0.1, "logit_bias": {"5": -1}, "min_tokens": 9}
    async with gateway.http.stream("POST", "/v1/chat/completions", json={**body, **options}) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        for _ in range(8):
            assert "error" not in await anext(lines)


async def test_logprobs(gateway: Gateway):
    answer = await gateway.chat(
        "Hi", max_tokens=20, logprobs=True, top_logprobs=2, chat_template_kwargs={"thinking": False}
    )
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["content"]
    spelled = bytes(byte for token in tokens for byte in token["bytes"]).decode(errors="replace")
    assert spelled == choice["message"]["content"]
    for token in tokens:
        assert len(token["top_logprobs"]) == 2
        assert token["logprob"] == pytest.approx(
            max(top["logprob"] for top in token["top_logprobs"]), abs=1e-3
        )


async def test_messages_with_the_real_client(gateway: Gateway):
    """A tool loop over Messages: forced calls, signatures, true counts, each turn upon the last one."""
    client = anthropic.AsyncAnthropic(base_url=str(gateway.http.base_url), api_key="one", max_retries=0)
    tools: Any = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ]
    long = "Read this: " + "the cat sat on the mat. " * 20
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]}
    ]
    previous = 0
    async with client:
        for step in range(3):
            body: Any = {
                "model": "kimi-k3",
                "max_tokens": 400,
                "system": [{"type": "text", "text": f"x-anthropic-billing-header: cch={step};"}],
                "messages": messages,
                "tools": tools,
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "extra_body": {"temperature": 0},
            }
            counted = await client.messages.count_tokens(
                **{name: body[name] for name in body.keys() - {"max_tokens"}}
            )
            starts: list[Any] = []
            async with client.messages.stream(**body) as stream:
                async for event in stream:
                    if event.type == "message_start":
                        # The stream's own copy is brought up to date with what follows.
                        starts.append(event.message.usage.model_copy())
                message = await stream.get_final_message()
            assert message.stop_reason == "tool_use"
            thinking, call = message.content
            assert thinking.type == "thinking"
            assert thinking.signature
            assert call.type == "tool_use"
            assert call.name in ("set_lamp", "set_fan")
            assert set(call.input) == {"mode", "level", "quick"}
            (start,), usage = starts, message.usage
            for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
                assert getattr(start, name) == getattr(usage, name)
            read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
            prompt = usage.input_tokens + read + written
            assert counted.input_tokens == prompt
            assert read + written == prompt // PAGE_TOKENS * PAGE_TOKENS
            if step:
                assert read >= previous // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
            else:
                assert read == 0
            previous = prompt
            shown = message.to_param()
            if step == 1:  # a client that shows no thinking, and calls the call otherwise
                call.id = "toolu_mine"
                shown = {"role": "assistant", "content": [call.model_dump()]}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"done {step}"}
            messages += [shown, {"role": "user", "content": [result]}]
        answer = await client.messages.with_raw_response.create(**{**body, "messages": messages})
        assert answer.headers["x-longhaul-restored"] == "reasoning=1, ids=1"
        assert "x-longhaul-divergence" not in answer.headers
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            too_long: Any = [{"role": "user", "content": "x y " * 20_000}]
            await client.messages.create(model="kimi-k3", max_tokens=9, messages=too_long)


async def test_responses_with_the_real_client(gateway: Gateway):
    """A tool loop by response ids, then the same session by items without reasoning."""
    from openai import AsyncOpenAI

    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "kimi-k3", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    more = {"temperature": 0, "max_output_tokens": 400}
    url = str(gateway.http.base_url).rstrip("/")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        items: list[Any] = [{"role": "user", "content": "Do it: " + "on and off. " * 20}]
        previous, cached_before = None, 0
        sealed: Any = ["reasoning.encrypted_content"]
        for step in range(3):
            new = items[-1:]
            async with client.responses.stream(
                input=new,
                previous_response_id=previous,
                include=sealed,
                **asked,
                **more,
            ) as stream:
                deltas = [
                    event.delta
                    async for event in stream
                    if event.type == "response.function_call_arguments.delta"
                ]
                response = await stream.get_final_response()
            assert response.status == "completed"
            (call,) = [item for item in response.output if item.type == "function_call"]
            assert call.arguments == "".join(deltas)
            assert set(json.loads(call.arguments)) == {"mode", "level", "quick"}
            usage = response.usage
            assert usage is not None
            cached = usage.input_tokens_details.cached_tokens
            assert cached >= cached_before
            if step:
                assert cached >= PAGE_TOKENS
            cached_before = cached
            previous = response.id
            kept = [item.to_dict() for item in response.output if item.type != "reasoning"]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": f"done {step}"}
            items += [*kept, result]
        by_id = await client.responses.with_raw_response.create(
            input=items[-1:], previous_response_id=previous, **asked, **more
        )
        by_items = await client.responses.with_raw_response.create(input=items, **asked, **more)
        assert by_id.headers["x-longhaul-parent"] == by_items.headers["x-longhaul-parent"]
        assert by_id.headers["x-longhaul-restored"] == "reasoning=0, ids=0"
        assert by_items.headers["x-longhaul-restored"] == "reasoning=3, ids=0"
        first, second = by_id.parse(), by_items.parse()
        assert first.usage is not None
        assert second.usage is not None
        assert first.usage.input_tokens == second.usage.input_tokens
        assert first.output[-1].to_dict()["arguments"] == second.output[-1].to_dict()["arguments"]


async def test_strict_tools_do_not_keep_the_model_from_ending(gateway: Gateway):
    """The engine takes the grammar of a whole message; random weights are held within it."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for thinking in (True, False):
        message, _ = await gateway.stream(
            "Say", tools=strict, max_tokens=40, chat_template_kwargs={"thinking": thinking}
        )
        assert message["finish"] in ("length", "stop", "tool_calls")
        assert message["content"] or message["reasoning_content"] or message["calls"]
