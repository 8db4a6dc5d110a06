"""A stand-in for SGLang that answers at once: what a gateway costs is measured in front of it.

It speaks the part of SGLang 0.5.23's HTTP that the gateway uses, and `/v1/chat/completions` for the proxies
that the gateway is compared with. What it samples is a K3 message: reasoning, then text of as many tokens as
asked for, which begins with a digest of the prompt, so that a turn can be told from every other.

    python -m bench.stub_engine --model DIR --port 30000 --tokens 64
"""

import argparse
import asyncio
import hashlib
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from bench.asgi import Receive, Send, body_of, lifespan
from bench.engines import free_port
from model.encoding import conversation_segments, generation_segments, message_segments
from model.tokenizer import K3Tokenizer

CONTEXT_TOKENS = 1 << 20
MODEL = "kimi-k3"
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 20.0

Script = Callable[[Mapping[str, Any]], Sequence[int]]


def sampled_ids(tokenizer: K3Tokenizer, message: Mapping[str, Any], *, thinking: bool = True) -> list[int]:
    """What a model samples to write an assistant message, from behind the generation prompt on."""
    segments = message_segments({"role": "assistant", **message}, thinking=thinking)
    return tokenizer.encode_segments(segments[len(generation_segments(thinking)) :])


def prompt_digest(ids: Sequence[int]) -> str:
    """Names a prompt in the text of its answer."""
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=8).hexdigest()


def digest_script(tokenizer: K3Tokenizer, tokens: int) -> Script:
    """A script whose text is the prompt's digest and then words, `tokens` ids together."""
    head = sampled_ids(tokenizer, {"reasoning_content": "Hm.", "content": "x"})
    last = tokenizer.encode_text("x")
    at = next(place for place in range(len(head)) if head[place : place + len(last)] == last)
    start, end = head[:at], head[at + len(last) :]
    word = tokenizer.encode_text(" word")
    words = (word * (tokens // len(word) + 1))[:tokens]

    def script(body: Mapping[str, Any]) -> Sequence[int]:
        named = tokenizer.encode_text(prompt_digest(body["input_ids"]))
        return [*start, *named, *words[len(named) :], *end]

    return script


class StubEngine:
    """An ASGI application. `chunk` ids go into an event, `delay_s` passes between two."""

    def __init__(
        self, tokenizer: K3Tokenizer, script: Script, *, chunk: int = 1, delay_s: float = 0.0
    ) -> None:
        self.script = script
        self.prompts: list[Sequence[int]] | None = None
        """The prompts that were sent, once this is a list."""
        self._tokenizer = tokenizer
        self._chunk = chunk
        self._delay_s = delay_s

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request (ASGI 3)."""
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        body = await body_of(receive)
        match scope["path"]:
            case "/generate":
                await self._generate(orjson.loads(body), send)
            case "/v1/chat/completions":
                await self._chat(orjson.loads(body), send)
            case "/tokenize":
                await _json(send, {"tokens": self._rendered(orjson.loads(body))})
            case "/server_info":
                info = {
                    "served_model_name": MODEL,
                    "max_req_input_len": CONTEXT_TOKENS - 6,
                    "version": "0.5.23",
                }
                await _json(send, info)
            case "/model_info":
                await _json(send, {"has_image_understanding": True})
            case "/v1/models":
                await _json(send, {"data": [{"id": MODEL, "max_model_len": CONTEXT_TOKENS}]})
            case _:  # /ready, /abort_request, /metrics
                await _json(send, {})

    async def _generate(self, body: Mapping[str, Any], send: Send) -> None:
        if self.prompts is not None:
            self.prompts.append(body["input_ids"])
        ids = self.script(body)
        await _start(send, b"text/event-stream")
        for start in range(0, len(ids), self._chunk):
            last = start + self._chunk >= len(ids)
            event = {
                "text": "",
                "output_ids": ids[start : start + self._chunk],
                "meta_info": {
                    "finish_reason": {"type": "stop", "matched": ids[-1]} if last else None,
                    "cached_tokens": 0,
                },
            }
            await _event(send, event)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
        await _end(send, b"data: [DONE]\n\n")

    async def _chat(self, body: Mapping[str, Any], send: Send) -> None:
        """As many events as `/generate` has, each with a word."""
        count = -(-len(self.script({"input_ids": [0]})) // self._chunk)
        head = {"id": "chatcmpl-stub", "created": int(time.time()), "model": MODEL}
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
        if not body.get("stream"):
            message = {"role": "assistant", "content": " word" * count}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            await _json(send, answer)
            return
        await _start(send, b"text/event-stream")
        for number in range(count):
            finish = "stop" if number == count - 1 else None
            choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": finish}
            await _event(send, {**head, "object": "chat.completion.chunk", "choices": [choice]})
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
        await _end(send, b"data: [DONE]\n\n")

    def _rendered(self, body: Mapping[str, Any]) -> list[int]:
        segments = conversation_segments(
            body["messages"],
            body.get("tools"),
            thinking=body.get("chat_template_kwargs", {}).get("thinking", True),
            thinking_effort=body.get("reasoning_effort"),
        )
        return self._tokenizer.encode_segments(segments)


async def _start(send: Send, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, event: Mapping[str, Any]) -> None:
    data = b"data: " + orjson.dumps(event) + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})


async def _json(send: Send, document: object) -> None:
    await _start(send, b"application/json")
    await _end(send, orjson.dumps(document))


@contextmanager
def serving(app: Any) -> Generator[str]:
    """Serve an application from a thread of this process; yields its URL."""
    port = free_port()
    config = uvicorn.Config(app, host=_HOST, port=port, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + _START_TIMEOUT_S
    while not server.started:
        if time.monotonic() > end:
            raise RuntimeError("the stub engine did not start")
        time.sleep(0.01)
    try:
        yield f"http://{_HOST}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m bench.stub_engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint, for its tokenizer")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="length of the text (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1, help="tokens an event (%(default)s)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time between events (%(default)s)")
    args = parser.parse_args()
    tokenizer = K3Tokenizer.load(args.model)
    app = StubEngine(
        tokenizer,
        digest_script(tokenizer, args.tokens),
        chunk=args.chunk,
        delay_s=args.delay_ms / 1000,
    )
    with socket.create_server((_HOST, args.port), reuse_port=False) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, loop="uvloop", lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
