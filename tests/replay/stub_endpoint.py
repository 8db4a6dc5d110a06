"""An endpoint in OpenAI's shape for tests of the client side.

It counts tokens with a real tokenizer, has a chat template with markup and an infinite prefix cache in
pages; it generates nothing.
"""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

OPEN, SEP, CLOSE, THINK = -1, -2, -3, -4
KNOWN_FIELDS = {"model", "messages", "stream", "stream_options", "max_completion_tokens"}
PROSE = """
The quick brown fox jumps over the lazy dog while people read old books and write new letters about the world.
In the morning a teacher asks her class how water moves and why the light of day is not the light of night.
Server and client send data to each other; the cache keeps what was read, and the file system holds the rest.
We should list all the words that we know, then sort them by length, and make a table of them at the end.
He can use it for one day, but what about the time when you have more work like this from them and so on?
I see no other way to get into the house now: come back in two or three years, if you still want to go there.
First make a new file, then open it with code, call the function, check its result, and save all the output.
"""


def train_tokenizer(vocab_size: int = 900) -> Tokenizer:
    """A byte-level BPE tokenizer which splits words as GPT-2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    return tokenizer


@dataclass
class StubEndpoint:
    """The server; `requests` are the bodies and headers that came in, `prompts` the token ids."""

    tokenizer: Tokenizer
    page: int = 1
    context: int = 1_000_000
    refuses_unknown_fields: bool = False
    reports_tiers: bool = True
    reports_cache: bool = True
    fails: dict[int, int] = field(default_factory=dict)
    token_s: float = 0.0
    requests: list[tuple[dict, dict]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    metrics_page: str = ""
    metrics_pages: list[str] = field(default_factory=list[str])
    url: str = ""

    def __post_init__(self):
        self._pages = set()
        self._turns = 0

    def render(self, messages) -> list[int]:
        """The prompt's ids: markup around each message, an empty thought in each answer."""
        ids = []
        for message in messages:
            ids += [OPEN, *self._encode(message["role"]), SEP]
            if message["role"] == "assistant":
                ids += [THINK, CLOSE]
            ids += [*self._encode(message["content"]), CLOSE, SEP]
        return [*ids, OPEN, *self._encode("assistant"), SEP, THINK]

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _hit(self, ids) -> int:
        hit, known, key = 0, True, 0
        for start in range(0, len(ids) - self.page + 1, self.page):
            key = hash((key, tuple(ids[start : start + self.page])))
            known = known and key in self._pages and start + self.page < len(ids)
            hit += self.page * known
            self._pages.add(key)
        return hit

    async def _complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.ports.add(request.client.port)
        extra = set(body) - KNOWN_FIELDS
        if self.refuses_unknown_fields and extra:
            return JSONResponse({"error": {"message": f"unknown fields {extra}"}}, 400)
        turn = self._turns
        if request.headers["x-correlation-id"] != "calibration":
            self._turns += 1
            self.requests.append((body, dict(request.headers)))
            if turn in self.fails:
                return JSONResponse({"error": {"message": "told to fail"}}, self.fails[turn])
        ids = self.render(body["messages"])
        output = body["max_completion_tokens"]
        if len(ids) + output > self.context:
            return JSONResponse(
                {"error": {"message": "context length", "code": "context_length_exceeded"}}, 400
            )
        hit = self._hit(ids)
        if request.headers["x-correlation-id"] != "calibration":
            self.prompts.append(ids)
            self.cached.append(hit)
        details = {}
        if self.reports_cache:
            details["cached_tokens"] = hit
        if self.reports_tiers:
            details["cached_tokens_details"] = {"device": hit, "host": 0, "storage": 0}
        usage = {"prompt_tokens": len(ids), "completion_tokens": output, "prompt_tokens_details": details}
        if not body.get("stream"):
            return JSONResponse({"choices": [], "usage": usage})
        return StreamingResponse(self._events(output, usage), media_type="text/event-stream")

    async def _events(self, output, usage):
        def event(document):
            return f"data: {json.dumps(document)}\n\n"

        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(output):
            await asyncio.sleep(self.token_s)
            yield event({"choices": [{"delta": {"content": "x"}}]})
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub", "max_model_len": self.context}]})

    async def _metrics(self, request: Request) -> Response:
        page = self.metrics_pages.pop(0) if self.metrics_pages else self.metrics_page
        return PlainTextResponse(page)

    def __enter__(self):
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(10)
