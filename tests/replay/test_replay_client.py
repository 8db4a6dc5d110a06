import httpx
import orjson
import pytest

from replay.client import ChatClient
from replay.errors import EndpointError, RequestFailed

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


class Pieces(httpx.AsyncByteStream):
    def __init__(self, data: bytes, size: int):
        self.pieces = [data[start : start + size] for start in range(0, len(data), size)]

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece


def events(*documents, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + orjson.dumps(document) + b"\n\n" for document in documents) + end


def client(handler, url="http://test") -> ChatClient:
    return ChatClient(url, transport=httpx.MockTransport(handler))


def streaming(data: bytes, size: int = 7):
    return client(lambda request: httpx.Response(200, stream=Pieces(data, size)))


def delta(**values):
    return {"choices": [{"delta": values}]}


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_reads_a_stream_however_it_is_cut(size):
    data = events(
        delta(role="assistant", content=""),
        delta(reasoning_content="é"),
        delta(content="x"),
        {"choices": [], "sglext": {"cached_tokens_details": {"device": 3, "host": 0}}},
        {"choices": [], "usage": USAGE},
    )
    answer = await streaming(data, size).stream(b"{}", "c")
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (5, 3)
    assert answer.tiers == {"device": 3, "host": 0, "storage": 0}
    assert answer.sent_s <= answer.first_token_s <= answer.end_s


async def test_line_ends_and_comments_of_other_servers():
    data = (b": ping\r\n\r\n" + events({"usage": USAGE})).replace(b"\n\n", b"\r\n\r\n")
    assert (await streaming(data).stream(b"{}", "c")).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (events(delta(content="x"), {"error": {"message": "overloaded"}}), "error in the stream"),
        (events(delta(content="x")), "no usage"),
        (b"data: {broken\n\n", "not JSON"),
        (b"", "no usage"),
    ],
)
async def test_failures_in_a_stream(data, reason):
    with pytest.raises(RequestFailed) as caught:
        await streaming(data).stream(b"{}", "c")
    assert caught.value.reason == reason


async def test_failures_before_a_stream():
    busy = client(lambda request: httpx.Response(503, json={"error": "busy"}))
    with pytest.raises(RequestFailed, match="busy") as caught:
        await busy.stream(b"{}", "c")
    assert caught.value.reason == "http 503"

    def silent(request):
        raise httpx.ReadTimeout("60 s")

    with pytest.raises(RequestFailed) as caught:
        await client(silent).stream(b"{}", "c")
    assert caught.value.reason == "timeout"


async def test_a_kept_connection_that_was_closed_is_opened_again_once():
    calls = []

    def handler(request):
        calls.append(request)
        if len(calls) == 1:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, content=events({"usage": USAGE}))

    assert (await client(handler).stream(b"{}", "c")).usage.prompt_tokens == 5
    assert len(calls) == 2

    def never(request):
        calls.append(request)
        raise httpx.ReadError("reset")

    calls.clear()
    with pytest.raises(RequestFailed) as caught:
        await client(never).stream(b"{}", "c")
    assert caught.value.reason == "ReadError" and len(calls) == 2


async def test_a_stream_that_breaks_is_not_sent_again():
    calls = []

    class Broken(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b"data: {}\n\n"
            raise httpx.ReadError("reset")

    def handler(request):
        calls.append(request)
        return httpx.Response(200, stream=Broken())

    with pytest.raises(RequestFailed) as caught:
        await client(handler).stream(b"{}", "c")
    assert caught.value.reason == "ReadError in the stream" and len(calls) == 1


async def test_what_a_request_carries():
    seen = []

    def handler(request):
        seen.append(request)
        return httpx.Response(200, content=events({"usage": USAGE}))

    chat = ChatClient("http://test/v1/", api_key="secret", transport=httpx.MockTransport(handler))
    chat.model = "m"
    fragments = [orjson.dumps({"role": "user", "content": "hi"})]
    await chat.stream(chat.body(fragments, 3), "conversation")
    await chat.stream(chat.body(fragments, 3), "conversation")
    first, second = seen
    assert str(first.url) == "http://test/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["x-correlation-id"] == second.headers["x-correlation-id"] == "conversation"
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert orjson.loads(first.content) == {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 3,
        "ignore_eos": True,
        "min_tokens": 3,
        "return_cached_tokens_details": True,
    }


async def test_only_the_fields_that_the_endpoint_refuses_are_dropped():
    def handler(request):
        body = orjson.loads(request.content)
        if "min_tokens" in body or "return_cached_tokens_details" in body:
            return httpx.Response(422, json={"error": "unknown field"})
        return httpx.Response(200, json={"usage": USAGE})

    chat = client(handler)
    chat.model = "m"
    assert await chat.prompt_tokens([{"role": "user", "content": "hi"}], "c") == 5
    assert chat.forcing.fields(9) == {"ignore_eos": True}


async def test_a_refusal_for_another_reason_drops_nothing():
    chat = client(lambda request: httpx.Response(400, json={"error": "no such model"}))
    with pytest.raises(RequestFailed, match="no such model"):
        await chat.prompt_tokens([], "c")
    assert all(chat.forcing.accepted.values())


async def test_finds_the_model_and_its_context():
    models = {"data": [{"id": "first", "max_model_len": 4096}, {"id": "second"}]}
    chat = client(lambda request: httpx.Response(200, json=models))
    await chat.connect(None)
    assert (chat.model, chat.context_tokens) == ("first", 4096)
    await chat.connect("second")
    assert (chat.model, chat.context_tokens) == ("second", None)


async def test_an_endpoint_without_models_needs_a_name():
    missing = client(lambda request: httpx.Response(404))
    await missing.connect("named")
    assert missing.model == "named"
    with pytest.raises(EndpointError, match="answers 404"):
        await missing.connect(None)
    with pytest.raises(EndpointError, match="--model"):
        await client(lambda request: httpx.Response(200, json={"data": []})).connect(None)

    def refuse(request):
        raise httpx.ConnectError("refused")

    with pytest.raises(EndpointError, match="is the service up"):
        await client(refuse).connect(None)


async def test_metrics_may_be_missing():
    assert await client(lambda request: httpx.Response(404)).metrics() is None
    assert await client(lambda request: httpx.Response(200, text="a 1\n")).metrics() == "a 1\n"
