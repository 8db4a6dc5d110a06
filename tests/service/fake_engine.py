"""A stand-in for SGLang where the real one can't be had: faults, overload, and answers known beforehand.

It listens on a real socket and answers as SGLang 0.5.23 does, lies included: refusals inside a stream of
status 200, deltas of ids, `finish_reason` objects.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from model.encoding import conversation_segments, message_segments
from model.tokenizer import K3Tokenizer

Event = Mapping[str, Any]
Script = Callable[[Mapping[str, Any]], AsyncIterator[Event | bytes]]

CONTEXT_TOKENS = 4096
SERVER_INFO = {
    "served_model_name": "kimi-k3",
    "max_req_input_len": CONTEXT_TOKENS - 6,
    "version": "0.5.23",
}


def meta(finish: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"finish_reason": finish, "cached_tokens": 0, **more}


def event(ids: Sequence[int], finish: Mapping[str, Any] | None = None, **more: Any) -> Event:
    return {"text": "", "output_ids": list(ids), "meta_info": meta(finish, **more)}


def abort(status: int, message: str) -> Event:
    return event([], {"type": "abort", "status_code": status, "message": message})


def reply_ids(tokenizer: K3Tokenizer, message: Mapping[str, Any], *, thinking: bool = True) -> list[int]:
    """What the model samples for a message, from behind the generation prompt to the end of the message."""
    segments = message_segments({"role": "assistant", **message}, thinking=thinking)
    opening = conversation_segments([{"role": "user", "content": ""}], thinking=thinking)
    prompt = conversation_segments(
        [{"role": "user", "content": ""}], thinking=thinking, add_generation_prompt=False
    )
    skipped = len(tokenizer.encode_segments(opening)) - len(tokenizer.encode_segments(prompt))
    return tokenizer.encode_segments(segments)[skipped:]


class FakeEngine:
    """Answers every request by `script`; keeps what it was asked."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.dropped = 0
        self.status: tuple[int, Mapping[str, Any]] | None = None
        self.renders_alike = True
        self.is_ready = True
        self.server_info = dict(SERVER_INFO)
        self.script: Script = self.reply({"content": "Hi"})

    def reply(
        self,
        message: Mapping[str, Any],
        *,
        size: int = 3,
        delay_s: float = 0.0,
        first_delay_s: float = 0.0,
        after: asyncio.Event | None = None,
        thinking: bool = True,
        finish: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Script:
        """A script that samples a message, `size` ids an event, once `after` is set; `more` goes into the
        meta_info."""
        ids = reply_ids(self.tokenizer, message, thinking=thinking)
        return self.sample(
            ids, size=size, delay_s=delay_s, first_delay_s=first_delay_s, after=after, finish=finish, **more
        )

    def sample(
        self,
        ids: Sequence[int],
        *,
        size: int = 3,
        delay_s: float = 0.0,
        first_delay_s: float = 0.0,
        after: asyncio.Event | None = None,
        finish: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Script:
        async def script(_: Mapping[str, Any]) -> AsyncIterator[Event]:
            await asyncio.sleep(first_delay_s)
            if after is not None:
                await after.wait()
            for start in range(0, len(ids), size):
                last = start + size >= len(ids)
                ends = (finish or {"type": "stop", "matched": ids[-1]}) if last else None
                yield event(ids[start : start + size], ends, **more)
                await asyncio.sleep(delay_s)

        return script

    @staticmethod
    def events(*events: Event | bytes) -> Script:
        """A script of ready-made events; bytes go out as they are."""

        async def script(_: Mapping[str, Any]) -> AsyncIterator[Event | bytes]:
            for item in events:
                yield item

        return script

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        if self.status is not None:
            status, answer = self.status
            return JSONResponse(answer, status_code=status)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        ended = False
        try:
            async for item in self.script(body):
                yield item if isinstance(item, bytes) else b"data: " + orjson.dumps(item) + b"\n\n"
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.dropped += not ended

    async def _abort(self, request: Request) -> Response:
        self.aborted.append(orjson.loads(await request.body())["rid"])
        return Response()

    async def _tokenize(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        segments = conversation_segments(
            body["messages"],
            body.get("tools"),
            thinking=body.get("chat_template_kwargs", {}).get("thinking", True),
            thinking_effort=body.get("reasoning_effort"),
        )
        ids = self.tokenizer.encode_segments(segments)
        return JSONResponse({"tokens": ids if self.renders_alike else ids[1:]})

    def app(self) -> Starlette:
        async def ready(_: Request) -> Response:
            return Response(status_code=200 if self.is_ready else 503)

        async def info(_: Request) -> Response:
            return JSONResponse(self.server_info)

        async def models(_: Request) -> Response:
            return JSONResponse({"data": [{"id": "kimi-k3", "max_model_len": CONTEXT_TOKENS}]})

        async def metrics(_: Request) -> Response:
            return PlainTextResponse("# HELP sglang:x x\n# TYPE sglang:x gauge\nsglang:x 1.0\n")

        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/ready", ready),
                Route("/server_info", info),
                Route("/v1/models", models),
                Route("/metrics", metrics),
            ]
        )


_GRACE_S = 1.0


@asynccontextmanager
async def listening(app: Any) -> AsyncGenerator[str]:
    """Serve an ASGI application on a free port of this machine; yields its URL.

    It ends as uvicorn does, without the ticks of 0.1 s there, which hundreds of tests would wait for.
    """
    config = uvicorn.Config(app, log_config=None, lifespan="on", access_log=False)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup(sockets=[listener])
        assert server.started and not server.should_exit, "the server did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for open_server in server.servers:
                open_server.close()
            state = server.server_state
            for connection in list(state.connections):
                connection.shutdown()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    while state.connections or state.tasks:
                        await asyncio.sleep(0.002)
            for task in state.tasks:
                task.cancel()
            await server.lifespan.shutdown()
