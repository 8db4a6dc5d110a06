import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest
from fake_engine import CONTEXT_TOKENS, FakeEngine, abort, event

from model.tokenizer import K3Tokenizer
from service.engine import Engine
from service.errors import (
    EngineError,
    EngineFailed,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    ServiceError,
)
from service.generation import Chunk, Generation, TokenLogprob, read_chunks

LEAK = "/usr/lib/python3/site-packages/sglang/srt/x.py: [1, 2, 3] is wrong"


def generation(ids: list[int] | None = None, **more: Any) -> Generation:
    return Generation(rid="r1", ids=[1, 2] if ids is None else ids, sampling={}, cache_salt="s", **more)


def client(engine: FakeEngine) -> Engine:
    return Engine(engine.url, vocabulary=engine.tokenizer.vocab_size)


async def collect(engine: Engine, request: Generation) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def test_ids_come_as_they_are_sampled(fake_engine: FakeEngine):
    taken = asyncio.Event()

    async def script(_: object):
        yield event([5, 6], cached_tokens=64)
        await taken.wait()
        yield event(
            [7],
            {"type": "length", "length": 3},
            cached_tokens=64,
            cached_tokens_details={"device": 0, "host": 16, "storage": 48, "storage_backend": "x"},
        )

    fake_engine.script = script
    chunks: list[Chunk] = []
    async with client(fake_engine) as engine:
        async for chunk in engine.generate(generation()):
            chunks.append(chunk)
            taken.set()
    assert chunks == [
        Chunk([5, 6], cached_device_tokens=64),
        Chunk([7], "length", cached_host_tokens=16, cached_storage_tokens=48),
    ]
    assert fake_engine.requests == [
        {"rid": "r1", "input_ids": [1, 2], "sampling_params": {}, "cache_salt": "s", "stream": True}
    ]
    assert fake_engine.aborted == []


def test_events_that_came_together_are_one_chunk_for_a_whole_answer():
    events = [event([5, 6]), event([7], cached_tokens=64), event([8], {"type": "stop", "matched": 8})]
    assert list(read_chunks([*events, event([9])], in_steps=False)) == [Chunk([5, 6, 7, 8], "stop")]
    assert [chunk.ids for chunk in read_chunks(events, in_steps=True)] == [[5, 6], [7], [8]]
    with_logprobs = [event([id], output_token_logprobs=[[-0.5, id, None]]) for id in (5, 6)]
    assert [chunk.ids for chunk in read_chunks(with_logprobs, in_steps=False)] == [[5], [6]]


@pytest.mark.parametrize("wrong", [{"error": {"code": 500, "message": "x"}}, {"text": "no ids"}])
def test_what_came_before_a_fault_is_not_lost(wrong: dict[str, Any]):
    chunks = read_chunks([event([5]), event([6]), wrong], in_steps=False)
    assert next(chunks) == Chunk([5, 6])
    with pytest.raises(EngineFailed):
        next(chunks)


async def test_logprobs(fake_engine: FakeEngine):
    fake_engine.script = fake_engine.events(
        event(
            [5],
            {"type": "stop", "matched": 5},
            output_token_logprobs=[[-0.5, 5, None]],
            output_top_logprobs=[[[-0.5, 5, None], [-1.5, 6, None]]],
        )
    )
    async with client(fake_engine) as engine:
        (chunk,) = await collect(engine, generation(top_logprobs=2))
    assert chunk.logprobs == (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),)
    assert fake_engine.requests[0]["return_logprob"] is True
    assert fake_engine.requests[0]["top_logprobs_num"] == 2


@pytest.mark.parametrize("ids", [[], [-1], [1, 10**6], [2048]])
async def test_an_id_outside_the_vocabulary_never_leaves(fake_engine: FakeEngine, ids: list[int]):
    async with client(fake_engine) as engine:
        with pytest.raises(EngineFailed):
            await collect(engine, generation(ids))
    assert fake_engine.requests == []


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (abort(503, "The request queue is full."), EngineOverloaded),
        (abort(503, "The request is aborted by a higher priority request."), EngineOverloaded),
        (abort(503, LEAK), EngineUnavailable),
        (abort(400, f"Failed to compile structural_tag grammar: {LEAK}"), InvalidRequest),
        (abort(400, LEAK), EngineFailed),
        (abort(500, LEAK), EngineFailed),
        (event([], {"type": "abort", "message": "Aborted"}), EngineFailed),
        (event([1], {"type": "stop", "matched": "NaN happened"}), EngineFailed),
        (event([1], {"type": "unheard of"}), EngineFailed),
        ({"error": {"message": LEAK, "code": 400}}, EngineFailed),
        ({"error": "what"}, EngineFailed),
        ({"output_ids": [1]}, EngineFailed),
        (event([1], cached_tokens_details=3), EngineFailed),
        (b"data: {]\n\n", EngineFailed),
        (b"data: [DONE]\n\n", EngineFailed),
    ],
)
async def test_refusals_become_our_errors(fake_engine: FakeEngine, first: Any, error: type[ServiceError]):
    fake_engine.script = fake_engine.events(first)
    async with client(fake_engine) as engine:
        with pytest.raises(ServiceError) as caught:
            await collect(engine, generation())
    assert type(caught.value) is error
    assert "sglang" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"), [(400, EngineFailed), (500, EngineFailed), (503, EngineUnavailable)]
)
async def test_a_status_is_a_refusal_too(fake_engine: FakeEngine, status: int, error: type[EngineError]):
    fake_engine.status = (status, {"error": {"message": LEAK}})
    async with client(fake_engine) as engine:
        with pytest.raises(error) as caught:
            await collect(engine, generation())
    assert "sglang" not in str(caught.value)


async def test_a_stream_that_breaks_off_is_no_completion(fake_engine: FakeEngine):
    fake_engine.script = fake_engine.events(event([1]), event([2]))
    async with client(fake_engine) as engine:
        with pytest.raises(EngineFailed):
            await collect(engine, generation())


async def test_who_stops_reading_aborts_the_work(fake_engine: FakeEngine, tokenizer: K3Tokenizer):
    fake_engine.script = fake_engine.sample([1] * 1000, delay_s=0.01)
    async with client(fake_engine) as engine, aclosing(engine.generate(generation())) as chunks:
        await anext(chunks)
    assert fake_engine.aborted == ["r1"]


async def test_a_cancelled_reader_aborts_the_work(fake_engine: FakeEngine):
    fake_engine.script = fake_engine.sample([1], first_delay_s=30)
    async with client(fake_engine) as engine:
        reading = asyncio.create_task(collect(engine, generation()))
        while not fake_engine.requests:
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert fake_engine.aborted == ["r1"]


async def test_no_engine_is_unavailable(tokenizer: K3Tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with Engine(f"http://127.0.0.1:{port}", vocabulary=tokenizer.vocab_size) as engine:
        with pytest.raises(EngineUnavailable) as caught:
            await collect(engine, generation())
        assert caught.value.retry_after_s is not None
        with pytest.raises(EngineUnavailable):
            await engine.info()
        assert not await engine.ready()
        assert await engine.metrics() == b""


async def test_an_engine_that_dies_before_answering(tokenizer: K3Tokenizer):
    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Engine(f"http://127.0.0.1:{port}", vocabulary=tokenizer.vocab_size) as engine:
        with pytest.raises(EngineUnavailable):
            await collect(engine, generation())


async def test_a_closed_connection_is_tried_once_more(fake_engine: FakeEngine):
    """What happens when the engine gives up a kept-alive connection just as it is used."""
    accepted = 0

    async def forward_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        if accepted > 1:
            port = int(fake_engine.url.rpartition(":")[2])
            upstream, to_upstream = await asyncio.open_connection("127.0.0.1", port)
            to_upstream.write(await reader.read(65536))
            while received := await upstream.read(65536):
                writer.write(received)
                await writer.drain()
            to_upstream.close()
        writer.close()

    fake_engine.script = fake_engine.events(event([1], {"type": "stop", "matched": 1}))
    server = await asyncio.start_server(forward_second, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Engine(url, vocabulary=2048) as engine:
        assert await collect(engine, generation()) == [Chunk([1], "stop")]
    assert accepted == 2


async def test_limits_are_the_engines(fake_engine: FakeEngine):
    async with client(fake_engine) as engine:
        info = await engine.info()
    assert info.model == "kimi-k3"
    assert info.context_tokens == CONTEXT_TOKENS
    # SGLang refuses prompts of max_req_input_len (4090) tokens, and grants 4095 with the output.
    assert (info.max_prompt_tokens, info.max_request_tokens) == (4089, 4095)
