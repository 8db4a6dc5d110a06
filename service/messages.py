"""`POST /v1/messages` and its token count: Anthropic Messages over the turns that every API shares."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from service.access import Record, record_of
from service.admission import priority_of
from service.errors import ServiceError
from service.exchange import served_model, start_turn, streamed_answer, whole_answer
from service.identity import identify
from service.messages_answer import PING, MessagesAnswer, error_body
from service.messages_request import MessagesRequest, read_messages_request
from service.runner import Turn, TurnRequest
from service.signature import Signer
from service.stream import named_event
from service.tenants import Tenant
from service.web import JsonResponse, authenticate, read_fields, service_of, turn_headers


async def messages(request: Request) -> Response:
    """Answer one request. Raises ServiceError, and ClientLeft."""
    tenant = authenticate(request)
    asked, turn_request, signer = await _read(request, tenant)
    record = record_of(request.scope)
    record.stream = asked.stream
    served = await served_model(service_of(request), asked.model)
    turn = await start_turn(request, turn_request)
    answer = MessagesAnswer(
        f"msg_{turn.prompt.turn}",
        served,
        signature=signer.sign(turn.prompt.turn),
        retention=asked.retention,
        show_thinking=asked.show_thinking,
        max_tokens=asked.sampling.max_tokens,
    )
    if asked.stream:
        return streamed_answer(request, turn, _events(turn, answer, record), ping=PING)
    body = await whole_answer(request, turn, _whole(turn, answer))
    return JsonResponse(body, headers=turn_headers(turn.prompt))


async def count_tokens(request: Request) -> Response:
    """Say how many tokens the prompt would have: those of the turns it would continue, and what is new."""
    tenant = authenticate(request)
    asked, turn_request, _ = await _read(request, tenant)
    service = service_of(request)
    await served_model(service, asked.model)
    return JsonResponse({"input_tokens": await service.runner.count(turn_request)})


async def _read(request: Request, tenant: Tenant) -> tuple[MessagesRequest, TurnRequest, Signer]:
    service = service_of(request)
    fields = await read_fields(request)
    signer = await service.signatures.signer(tenant.name)
    asked = read_messages_request(
        fields, service.sampling_defaults, service.tokenizer.vocab_size, signer.turn_of
    )
    session = identify(request.headers, fields.values)
    record = record_of(request.scope)
    record.session = session.id if session else None
    turn_request = TurnRequest(
        tenant=tenant,
        session=record.session,
        conversation=asked.conversation,
        sampling=asked.sampling,
        single_call=asked.single_call,
        ttl=asked.ttl,
        stream=asked.stream,
        priority=priority_of(fields.values.get("service_tier")),
    )
    return asked, turn_request, signer


async def _whole(turn: Turn, answer: MessagesAnswer) -> dict[str, Any]:
    async for _ in turn:
        pass
    assert turn.completion is not None, "the steps end with the completion"
    return answer.whole(turn.completion, turn.stop_string)


async def _events(turn: Turn, answer: MessagesAnswer, record: Record) -> AsyncGenerator[bytes]:
    """The stream. It opens with the engine's first tokens, when it is known how many were cached."""
    opened = False
    try:
        async for step in turn:
            events = [] if opened else [answer.first_event(turn.usage)]
            opened = True
            events += answer.events(step)
            if events:
                yield b"".join(map(named_event, events))
    except ServiceError as error:
        record.error = error.code or error.kind
        yield named_event(error_body(error, record.request_id))
        return
    assert turn.completion is not None, "the steps end with the completion"
    yield b"".join(map(named_event, answer.last_events(turn.completion, turn.stop_string)))
