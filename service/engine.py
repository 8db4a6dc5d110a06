"""Client of SGLang's HTTP server: ids in, ids out.

Only `/generate` carries exact token ids in a stream, so everything is generated through it. What it answers
is read with distrust (SGLang 0.5.23): a stream's status is 200 even when the request is refused, an id
outside the vocabulary kills the server, a NaN in the logits ends a turn as if a stop string had matched, and
error texts hold file paths and ids. Texts go to the log; a caller gets a `ServiceError` in our words.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import orjson
from yarl import URL

from service.admission_places import Room
from service.errors import EngineFailed, EngineUnavailable, ServiceError
from service.generation import Chunk, Generation, read_chunks, refusal

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0
_CONTROL_TIMEOUT_S: Final = 10.0
_CONTROL: Final = aiohttp.ClientTimeout(total=_CONTROL_TIMEOUT_S)
_DRAIN_TIMEOUT_S: Final = 1.0
# SGLang closes an idle connection after SGLANG_TIMEOUT_KEEP_ALIVE = 5 s: give ours up before it does.
_KEEP_ALIVE_S: Final = 3.0
_FAULTS: Final = (aiohttp.ClientError, TimeoutError)
_GIVEN_UP: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_JSON: Final = {"content-type": "application/json"}
_REQUEST_SLACK_TOKENS: Final = 5
"""`max_req_input_len` is the longest request minus this (managers/tp_worker.py)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves.

    context_tokens: the model's context length, as clients are told.
    max_prompt_tokens: the longest prompt that is taken.
    max_request_tokens: prompt and output together; smaller than the context where the KV pool is.
    vision: whether it takes images.
    room: what its device holds; None where it doesn't say.
    """

    model: str
    context_tokens: int
    max_prompt_tokens: int
    max_request_tokens: int
    version: str
    room: Room | None = None
    vision: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.max_prompt_tokens < self.max_request_tokens <= self.context_tokens


class Engine:
    """One SGLang server. `vocabulary` bounds the ids that may be sent (exclusive).

    name: its address, host and port. available: whether it was there when last asked; true until then.
    """

    def __init__(
        self,
        url: str,
        *,
        vocabulary: int,
        api_key: str | None = None,
        silence_timeout_s: float = 900.0,
    ) -> None:
        self._vocabulary = vocabulary
        self._url = URL(url.rstrip("/"))
        self.name = f"{self._url.host}:{self._url.port}"
        self.available = True
        self._api_key = api_key
        self._silence_timeout_s = silence_timeout_s
        self._opened: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._drains: set[asyncio.Task[None]] = set()

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
        if self._drains:
            await asyncio.wait(self._drains, timeout=_DRAIN_TIMEOUT_S)
        if self._opened is not None:
            await self._opened.close()

    @property
    def _client(self) -> aiohttp.ClientSession:
        """The session with its connections; it belongs to the event loop that first uses it."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                headers={"authorization": f"Bearer {self._api_key}"} if self._api_key else {},
                # A prefill is silent for as long as it takes; a dead engine closes the connection.
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._silence_timeout_s
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            )
        return self._opened

    async def info(self) -> EngineInfo:
        """What the engine serves; asked again after a connection has failed. Raises EngineUnavailable."""
        if self._info is None:
            answer = await self._get_json("/server_info")
            try:
                request_tokens = int(answer["max_req_input_len"]) + _REQUEST_SLACK_TOKENS
                models = await self._get_json("/v1/models")
                model = await self._get_json("/model_info", optional=True)
                self._info = EngineInfo(
                    model=str(answer["served_model_name"]),
                    context_tokens=int(models["data"][0]["max_model_len"]),
                    max_prompt_tokens=int(answer["max_req_input_len"]) - 1,
                    max_request_tokens=request_tokens,
                    version=str(answer["version"]),
                    room=_read_room(answer),
                    vision=bool(model.get("has_image_understanding")),
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                log.error("the engine's /server_info is not SGLang's: %r", error)
                raise EngineUnavailable from None
        return self._info

    async def ready(self) -> bool:
        """Whether the engine takes requests now."""
        try:
            async with self._client.get(self._url / "ready", timeout=_CONTROL) as answer:
                self.available = answer.status == 200
        except _FAULTS:
            self._info = None
            self.available = False
        return self.available

    async def metrics(self) -> bytes:
        """The engine's Prometheus page; empty when it has none or can't be reached."""
        try:
            async with self._client.get(self._url / "metrics", timeout=_CONTROL) as answer:
                return await answer.read() if answer.status == 200 else b""
        except _FAULTS:
            return b""

    async def tokenize(self, request: Mapping[str, Any]) -> list[int]:
        """The ids of the prompt that SGLang itself renders for a chat request. Raises EngineError."""
        try:
            async with self._client.post(
                self._url / "tokenize", data=orjson.dumps(request), headers=_JSON, timeout=_CONTROL
            ) as answer:
                tokens: object = orjson.loads(await answer.read())["tokens"]
        except _FAULTS as error:
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
        _check_ids(generation, self._vocabulary)
        ended = False
        try:
            async with aclosing(self._events(generation)) as batches:
                async for events in batches:
                    for chunk in read_chunks(events, in_steps=generation.in_steps):
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
                self._keep(self._aborts, self.abort(generation.rid))

    async def _events(self, generation: Generation) -> AsyncGenerator[list[dict[str, Any]]]:
        answer = await self._post(generation.body())
        ended = False
        try:
            if answer.status != 200:
                raise refusal(answer.status, (await answer.read()).decode(errors="replace"))
            async with aclosing(_server_sent_events(answer)) as batches:
                async for events in batches:
                    meta = events[-1].get("meta_info")
                    ended = isinstance(meta, dict) and meta.get("finish_reason") is not None
                    yield events
        except _FAULTS as error:
            self._unavailable("/generate", error)
            raise EngineFailed from None
        finally:
            if ended:
                # What follows is the end of the stream: read it, and the connection can be used again.
                self._keep(self._drains, _drain(answer))
            else:
                answer.close()

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        for attempt in (1, 2):
            try:
                return await self._client.post(self._url / "generate", data=body, headers=_JSON)
            except _FAULTS as error:
                unavailable = self._unavailable("/generate", error)
                # A kept-alive connection that the engine had just given up: nothing was begun, so ask again.
                if attempt == 2 or not isinstance(error, _GIVEN_UP):
                    raise unavailable from None
        raise AssertionError("the second attempt returns or raises")

    def _keep(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def abort(self, rid: str) -> None:
        """End the engine's work on a request; without effect when it has ended. Never raises."""
        body = orjson.dumps({"rid": rid})
        try:
            async with self._client.post(
                self._url / "abort_request", data=body, headers=_JSON, timeout=_CONTROL
            ):
                pass
        except _FAULTS as error:
            log.warning("rid %s: not aborted: %r", rid, error)

    async def _get_json(self, path: str, *, optional: bool = False) -> Any:
        """What a path answers; nothing where the engine need not have it."""
        try:
            async with self._client.get(self._url.joinpath(path[1:]), timeout=_CONTROL) as answer:
                status, content = answer.status, await answer.read()
        except _FAULTS as error:
            raise self._unavailable(path, error) from None
        if status == 404 and optional:
            return {}
        if status != 200:
            log.warning("the engine answers %s with %d", path, status)
            raise EngineUnavailable
        try:
            return orjson.loads(content)
        except ValueError:
            log.error("the engine's %s is not JSON", path)
            raise EngineUnavailable from None

    def _unavailable(self, path: str, error: Exception) -> EngineUnavailable:
        log.warning("the engine's %s failed: %r", path, error)
        self._info = None  # another one, with other limits, may answer next
        self.available = False
        return EngineUnavailable()


def _read_room(answer: Mapping[str, Any]) -> Room | None:
    """The sizes of all data-parallel ranks together, from `/server_info`."""
    tokens = answer.get("max_total_num_tokens")
    ranks: list[Mapping[str, Any]] = answer.get("internal_states") or []
    if not isinstance(tokens, int) or tokens < 1 or not ranks:
        return None
    slots, running = (
        sum(rank.get(name) or 0 for rank in ranks) or None
        for name in ("max_mamba_cache_size", "effective_max_running_requests_per_dp")
    )
    return Room(tokens * len(ranks), slots, running)


def _check_ids(generation: Generation, vocabulary: int) -> None:
    """Let no id outside [0, vocabulary) through: the engine would die of it, with every request in it."""
    ids, highest = generation.ids, generation.highest
    if highest is None:
        highest = max(ids, default=0)
        if min(ids, default=0) < 0:
            highest = vocabulary
    if not ids or highest >= vocabulary:
        log.critical("a prompt of %d ids leaves [0, %d): refused", len(ids), vocabulary)
        raise EngineFailed


async def _drain(answer: aiohttp.ClientResponse) -> None:
    with suppress(*_FAULTS):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            await answer.read()
    answer.close()  # without effect on what was read to its end


async def _server_sent_events(answer: aiohttp.ClientResponse) -> AsyncGenerator[list[dict[str, Any]]]:
    """The events that have come together, at least one at a time."""
    pending = b""
    async for received in answer.content.iter_any():
        *lines, pending = (pending + received).split(b"\n\n")
        events: list[dict[str, Any]] = []
        ended = False
        try:
            for line in lines:
                data = line.removeprefix(b"data: ")
                if ended := data == b"[DONE]":
                    break
                events.append(orjson.loads(data))
        except ValueError:
            log.error("the engine's stream holds what is not JSON")
            if events:
                yield events
            raise EngineFailed from None
        if events:
            yield events
        if ended:
            return
