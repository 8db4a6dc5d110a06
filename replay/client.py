"""The HTTP client: OpenAI Chat Completions, streamed, timed.

HTTP/1.1 with kept connections. Every request has an `X-Request-ID`, every conversation an `X-Correlation-ID`.
"""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import httpx
import orjson

from replay.errors import EndpointError, RequestFailed
from replay.usage import Usage, parse_tiers, parse_usage

CONNECT_TIMEOUT_S = 10.0
COMPLETIONS = "/v1/chat/completions"
OK = 200
STALE_CONNECTION = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
REFUSALS = (400, 422)
DETAIL_LENGTH = 300


@dataclass(slots=True)
class Forcing:
    """Fields beyond OpenAI's that a request carries while the endpoint takes them.

    `ignore_eos` and `min_tokens` make the output exactly as long as the trace says;
    `return_cached_tokens_details` asks SGLang for the tiers.
    """

    accepted: dict[str, bool] = field(
        default_factory=lambda: {"ignore_eos": True, "min_tokens": True, "return_cached_tokens_details": True}
    )

    def fields(self, output_tokens: int) -> dict[str, Any]:
        """The fields to add to a request for so many tokens."""
        values = {"ignore_eos": True, "min_tokens": output_tokens, "return_cached_tokens_details": True}
        return {name: value for name, value in values.items() if self.accepted[name]}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back and when: seconds of `time.perf_counter`.

    `first_token_s` is the first piece of text, reasoning or tool call; where none came, the end. `text` is
    the answer's content, without reasoning and calls.
    """

    sent_s: float
    first_token_s: float
    end_s: float
    usage: Usage
    tiers: Mapping[str, int]
    text: str = ""


class ChatClient:
    """A client of one endpoint, for any number of requests at once; an async context manager.

    `url` is the server's root, with or without `/v1`. `timeout_s` bounds the wait for the next bytes.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.context_tokens: int | None = None
        self.forcing = Forcing()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=300.0),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def connect(self, model: str | None) -> None:
        """Choose the model (default: the first that the endpoint lists) and learn its context.

        Raises EndpointError.
        """
        listed: list[dict[str, Any]] = []
        try:
            response = await self._http.get("/v1/models")
            if response.status_code == OK:
                listed = list(orjson.loads(response.content)["data"])
            elif model is None:
                raise EndpointError(
                    f"{self.url}/v1/models answers {response.status_code}: {_detail(response.content)}"
                )
        except httpx.HTTPError as error:
            raise EndpointError(
                f"{self.url} can't be reached ({_name(error)}): is the service up there?"
            ) from error
        except (orjson.JSONDecodeError, LookupError, TypeError):
            pass  # not a list of models; --model does without one
        if model is None and not listed:
            raise EndpointError(f"{self.url}/v1/models lists no model: name one with --model")
        self.model = model or str(listed[0].get("id"))
        length = next((entry.get("max_model_len") for entry in listed if entry.get("id") == self.model), None)
        self.context_tokens = length if isinstance(length, int) else None

    async def prompt_tokens(self, messages: Sequence[Mapping[str, str]], correlation_id: str) -> int:
        """The prompt tokens that the endpoint reports for these messages; asks for one token of output.

        Drops the forcing fields that the endpoint refuses. Raises RequestFailed.
        """
        body = {"model": self.model, "messages": list(messages), "max_completion_tokens": 1}
        headers = _headers(correlation_id)
        response = await self._post({**body, **self.forcing.fields(1)}, headers)
        if response.status_code in REFUSALS and any(self.forcing.accepted.values()):
            response = await self._drop_refused_fields(body, headers, response)
        if response.status_code != OK:
            raise RequestFailed(f"http {response.status_code}", _detail(response.content))
        usage = parse_usage(_document(response.content))
        if usage is None:
            raise RequestFailed("no usage", "the answer has no usage.prompt_tokens")
        return usage.prompt_tokens

    async def _drop_refused_fields(
        self, body: dict[str, Any], headers: dict[str, str], refused: httpx.Response
    ) -> httpx.Response:
        response = await self._post(body, headers)
        if response.status_code != OK:
            return refused  # the fields were not the reason
        for name, accepted in self.forcing.accepted.items():
            if accepted:
                alone = await self._post({**body, name: self.forcing.fields(1)[name]}, headers)
                self.forcing.accepted[name] = alone.status_code == OK
        return response

    async def _post(self, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        try:
            return await self._http.post(
                COMPLETIONS, content=orjson.dumps(body), headers={**headers, "accept": "application/json"}
            )
        except httpx.HTTPError as error:
            raise RequestFailed(_name(error), str(error)) from error

    def body(self, fragments: Sequence[bytes], output_tokens: int, *, forced: bool = True) -> bytes:
        """A streamed request; `fragments` are the messages, each as JSON.

        For exactly `output_tokens` where the endpoint can be forced, for at most so many without `forced`.
        """
        settings = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": output_tokens,
            **(self.forcing.fields(output_tokens) if forced else {}),
        }
        return b'{"messages":[' + b",".join(fragments) + b"]," + orjson.dumps(settings)[1:]

    async def stream(self, body: bytes, correlation_id: str) -> Answer:
        """Send a request made by `body` and read the stream to its end. Raises RequestFailed."""
        try:
            try:
                return await self._send(body, correlation_id)
            except STALE_CONNECTION:
                # The server may close a kept connection just when the next request is sent on it.
                return await self._send(body, correlation_id)
        except httpx.HTTPError as error:
            raise RequestFailed(_name(error), str(error)) from error

    async def _send(self, body: bytes, correlation_id: str) -> Answer:
        headers = {**_headers(correlation_id), "accept": "text/event-stream"}
        sent_s = time.perf_counter()
        async with self._http.stream("POST", COMPLETIONS, content=body, headers=headers) as response:
            return await _read(response, sent_s)

    async def metrics(self) -> str | None:
        """The text of `/metrics`, None where there is none."""
        try:
            response = await self._http.get("/metrics", timeout=CONNECT_TIMEOUT_S)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == OK else None


async def _read(response: httpx.Response, sent_s: float) -> Answer:
    if response.status_code != OK:
        raise RequestFailed(f"http {response.status_code}", _detail(await response.aread()))
    usage: Usage | None = None
    tiers: dict[str, int] = {}
    first_token_s: float | None = None
    text: list[str] = []
    try:
        async for data in _events(response):
            chunk = _document(data)
            if "error" in chunk:
                raise RequestFailed("error in the stream", _detail(data))
            if first_token_s is None and _has_output(chunk):
                first_token_s = time.perf_counter()
            text += _content(chunk)
            usage = parse_usage(chunk) or usage
            tiers = parse_tiers(chunk) or tiers
    except httpx.HTTPError as error:
        raise RequestFailed(f"{_name(error)} in the stream", str(error)) from error
    end_s = time.perf_counter()
    if usage is None:
        raise RequestFailed("no usage", "the stream ended without usage")
    return Answer(sent_s, first_token_s or end_s, end_s, usage, tiers, "".join(text))


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of the server-sent events of a response (one `data` line per event) but for `[DONE]`.

    Reads to the end, so that the connection can be used again.
    """
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data


def _has_output(chunk: Mapping[str, Any]) -> bool:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            return True
    return False


def _content(chunk: Mapping[str, Any]) -> list[str]:
    pieces = [(choice.get("delta") or {}).get("content") for choice in chunk.get("choices") or ()]
    return [piece for piece in pieces if isinstance(piece, str)]


def _document(data: bytes) -> dict[str, Any]:
    try:
        document: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestFailed("not JSON", _detail(data)) from error
    if not isinstance(document, dict):
        raise RequestFailed("not JSON", _detail(data))
    return cast("dict[str, Any]", document)


def _headers(correlation_id: str) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "x-request-id": str(uuid.uuid4()),
        "x-correlation-id": correlation_id,
    }


def _name(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "connection refused"
    return "timeout" if isinstance(error, httpx.TimeoutException) else type(error).__name__


def _detail(content: bytes) -> str:
    return content[:DETAIL_LENGTH].decode(errors="replace")
