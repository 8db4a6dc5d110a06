"""Client of SGLang's HTTP server: ids in, ids out.

Only `/generate` carries exact token ids in a stream, so everything is generated through it. What it answers
is read with distrust (SGLang 0.5.23): a stream's status is 200 even when the request is refused, an id
outside the vocabulary kills the server, a NaN in the logits ends a turn as if a stop string had matched, and
error texts hold file paths and ids. Texts go to the log; a caller gets a `ServiceError` in our words.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx
import orjson

from service.errors import EngineFailed, EngineUnavailable, ServiceError
from service.generation import Chunk, Generation, read_chunk, refusal

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0
_CONTROL_TIMEOUT_S: Final = 10.0
# SGLang closes an idle connection after SGLANG_TIMEOUT_KEEP_ALIVE = 5 s: give ours up before it does.
_KEEP_ALIVE_S: Final = 3.0
_GIVEN_UP: Final = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
_REQUEST_SLACK_TOKENS: Final = 5
"""`max_req_input_len` is the longest request minus this (managers/tp_worker.py)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves.

    context_tokens: the model's context length, as clients are told.
    max_prompt_tokens: the longest prompt that is taken.
    max_request_tokens: prompt and output together; smaller than the context where the KV pool is.
    """

    model: str
    context_tokens: int
    max_prompt_tokens: int
    max_request_tokens: int
    version: str

    def __post_init__(self) -> None:
        assert 0 < self.max_prompt_tokens < self.max_request_tokens <= self.context_tokens


class Engine:
    """One SGLang server. `vocabulary` bounds the ids that may be sent (exclusive)."""

    def __init__(
        self,
        url: str,
        *,
        vocabulary: int,
        api_key: str | None = None,
        silence_timeout_s: float = 900.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            # A prefill is silent for as long as it takes; a dead engine closes the connection.
            timeout=httpx.Timeout(silence_timeout_s, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_keepalive_connections=64, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,
            transport=transport,
        )
        self._info: EngineInfo | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send the aborts that are under way, then give the connections back."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_CONTROL_TIMEOUT_S)
        await self._client.aclose()

    async def info(self) -> EngineInfo:
        """What the engine serves; asked again after a connection has failed. Raises EngineUnavailable."""
        if self._info is None:
            answer = await self._get_json("/server_info")
            try:
                request_tokens = int(answer["max_req_input_len"]) + _REQUEST_SLACK_TOKENS
                models = await self._get_json("/v1/models")
                self._info = EngineInfo(
                    model=str(answer["served_model_name"]),
                    context_tokens=int(models["data"][0]["max_model_len"]),
                    max_prompt_tokens=int(answer["max_req_input_len"]) - 1,
                    max_request_tokens=request_tokens,
                    version=str(answer["version"]),
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                log.error("the engine's /server_info is not SGLang's: %r", error)
                raise EngineUnavailable from None
        return self._info

    async def ready(self) -> bool:
        """Whether the engine takes requests now."""
        try:
            answer = await self._client.get("/ready", timeout=_CONTROL_TIMEOUT_S)
        except httpx.HTTPError:
            self._info = None
            return False
        return answer.status_code == 200

    async def metrics(self) -> bytes:
        """The engine's Prometheus page; empty when it has none or can't be reached."""
        try:
            answer = await self._client.get("/metrics", timeout=_CONTROL_TIMEOUT_S, follow_redirects=True)
        except httpx.HTTPError:
            return b""
        return answer.content if answer.status_code == 200 else b""

    async def tokenize(self, request: Mapping[str, Any]) -> list[int]:
        """The ids of the prompt that SGLang itself renders for a chat request. Raises EngineError."""
        try:
            answer = await self._client.post("/tokenize", json=request, timeout=_CONTROL_TIMEOUT_S)
            tokens: object = orjson.loads(answer.content)["tokens"]
        except httpx.HTTPError as error:
            raise self._unavailable("/tokenize", error) from None
        except (ValueError, KeyError, TypeError):
            raise EngineFailed from None
        if not isinstance(tokens, list):
            raise EngineFailed
        return tokens  # pyright: ignore[reportUnknownVariableType] # compared, never used as ids

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk]:
        """Stream the ids of one completion; the last chunk has `stop` set.

        Closing the generator before that aborts the engine's work. Raises InvalidRequest for what the engine
        refuses of the client's doing, else EngineOverloaded, EngineUnavailable or EngineFailed.
        """
        _check_ids(generation.ids, self._vocabulary)
        ended = False
        try:
            async with aclosing(self._events(generation)) as events:
                async for event in events:
                    chunk = read_chunk(event)
                    ended = chunk.stop is not None
                    yield chunk
                    if ended:
                        return
            log.error("rid %s: the engine's stream ended without a finish reason", generation.rid)
            raise EngineFailed
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended:
                task = asyncio.create_task(self.abort(generation.rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        body = generation.body()
        for attempt in (1, 2):
            started = False
            try:
                async with self._client.stream(
                    "POST", "/generate", content=body, headers={"content-type": "application/json"}
                ) as answer:
                    started = True
                    if answer.status_code != 200:
                        raise refusal(answer.status_code, (await answer.aread()).decode(errors="replace"))
                    async with aclosing(_server_sent_events(answer)) as events:
                        async for event in events:
                            yield event
                return
            except httpx.HTTPError as error:
                unavailable = self._unavailable("/generate", error)
                if started:
                    raise EngineFailed from None
                # A kept-alive connection that the engine had just given up: nothing was begun, so ask again.
                if attempt == 2 or not isinstance(error, _GIVEN_UP):
                    raise unavailable from None

    async def abort(self, rid: str) -> None:
        """End the engine's work on a request; without effect when it has ended. Never raises."""
        try:
            await self._client.post("/abort_request", json={"rid": rid}, timeout=_CONTROL_TIMEOUT_S)
        except httpx.HTTPError as error:
            log.warning("rid %s: not aborted: %r", rid, error)

    async def _get_json(self, path: str) -> Any:
        try:
            answer = await self._client.get(path, timeout=_CONTROL_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._unavailable(path, error) from None
        if answer.status_code != 200:
            log.warning("the engine answers %s with %d", path, answer.status_code)
            raise EngineUnavailable
        try:
            return orjson.loads(answer.content)
        except ValueError:
            log.error("the engine's %s is not JSON", path)
            raise EngineUnavailable from None

    def _unavailable(self, path: str, error: httpx.HTTPError) -> EngineUnavailable:
        log.warning("the engine's %s failed: %r", path, error)
        self._info = None  # another one, with other limits, may answer next
        return EngineUnavailable()


def _check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Let no id outside [0, vocabulary) through: the engine would die of it, with every request in it."""
    if not ids or min(ids) < 0 or max(ids) >= vocabulary:
        log.critical("a prompt of %d ids leaves [0, %d): refused", len(ids), vocabulary)
        raise EngineFailed


async def _server_sent_events(answer: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    pending = b""
    async for received in answer.aiter_raw():
        *events, pending = (pending + received).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            try:
                yield orjson.loads(data)
            except ValueError:
                log.error("the engine's stream holds what is not JSON")
                raise EngineFailed from None
