"""`POST /v1/chat/completions`: OpenAI Chat Completions over the turns that every API shares."""

import secrets
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from service.access import Record, record_of
from service.admission import priority_of
from service.chat_answer import ChatAnswer, error_body
from service.chat_request import ChatRequest, read_chat_request, read_retention
from service.errors import ServiceError
from service.exchange import served_model, start_turn, streamed_answer, whole_answer
from service.generation import TokenLogprob
from service.identity import identify
from service.runner import Turn, TurnRequest
from service.stream import DONE, data_event
from service.web import JsonResponse, authenticate, read_fields, service_of, turn_headers


async def chat_completions(request: Request) -> Response:
    """Answer one request. Raises ServiceError, and ClientLeft."""
    service, record = service_of(request), record_of(request.scope)
    tenant = authenticate(request)
    fields = await read_fields(request)
    chat = read_chat_request(fields, service.sampling_defaults, service.tokenizer.vocab_size)
    session = identify(request.headers, fields.values)
    record.stream = chat.stream
    record.session = session.id if session else None
    served = await served_model(service, chat.model)
    turn_request = TurnRequest(
        tenant=tenant,
        session=record.session,
        conversation=chat.conversation,
        sampling=chat.sampling,
        single_call=chat.single_call,
        ttl=read_retention(fields),
        stream=chat.stream,
        priority=priority_of(fields.values.get("service_tier")),
    )
    turn = await start_turn(request, turn_request)
    answer = ChatAnswer(
        f"chatcmpl-{secrets.token_hex(12)}", served, service.tokenizer, include_usage=chat.include_usage
    )
    if chat.stream:
        return streamed_answer(request, turn, _events(turn, answer, record))
    body = await whole_answer(request, turn, _whole(turn, chat, answer))
    return JsonResponse(body, headers=turn_headers(turn.prompt))


async def _whole(turn: Turn, chat: ChatRequest, answer: ChatAnswer) -> dict[str, object]:
    logprobs: list[TokenLogprob] = []
    async for step in turn:
        logprobs += step.logprobs
    assert turn.completion is not None, "the steps end with the completion"
    return answer.whole(turn.completion, None if chat.sampling.top_logprobs is None else logprobs)


async def _events(turn: Turn, answer: ChatAnswer, record: Record) -> AsyncGenerator[bytes]:
    yield data_event(answer.first_chunk())
    try:
        async for step in turn:
            if events := b"".join(data_event(chunk) for chunk in answer.chunks(step)):
                yield events
    except ServiceError as error:
        record.error = error.code or error.kind
        yield data_event(error_body(error)) + DONE
        return
    assert turn.completion is not None, "the steps end with the completion"
    yield b"".join(data_event(chunk) for chunk in answer.last_chunks(turn.completion)) + DONE
