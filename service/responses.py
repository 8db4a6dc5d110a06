"""`/v1/responses`: OpenAI Responses over the turns that every API shares."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from service.access import Record, record_of
from service.admission import priority_of
from service.chat_request import read_retention
from service.conversation import Conversation
from service.errors import InvalidRequest, ServiceError
from service.exchange import served_model, start_turn, streamed_answer, whole_answer
from service.fields import Fields
from service.identity import identify
from service.responses_answer import Event, ResponsesAnswer
from service.responses_items import Item, messages_of, relocated
from service.responses_request import ResponsesRequest, read_responses_request
from service.responses_store import ResponseStore, turn_of_response
from service.runner import Turn, TurnRequest
from service.web import JsonResponse, authenticate, read_fields, service_of, turn_headers

MAX_LISTED: Final = 100
_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request: its own items, and the turns of the responses before it."""

    store: ResponseStore
    tenant: str
    request: ResponsesRequest
    items: list[Item]
    path: list[str]

    async def keep(self, turn: Turn, body: dict[str, Any]) -> None:
        """Store the response, if that was asked for; what could not be stored says so."""
        if self.request.store:
            kept = await self.store.save(self.tenant, turn.prompt.turn, body, self.items, self.path)
            body["store"] = kept


async def create_response(request: Request) -> Response:
    """Answer `POST /v1/responses`. Raises ServiceError, and ClientLeft."""
    service, record = service_of(request), record_of(request.scope)
    tenant = authenticate(request)
    fields = await read_fields(request)
    asked = read_responses_request(fields, service.sampling_defaults, service.tokenizer.vocab_size)
    session = identify(request.headers, fields.values)
    record.stream = asked.stream
    record.session = session.id if session else None
    model = await served_model(service, asked.model)
    store = service.responses
    history, path = await store.history(tenant.name, asked.previous) if asked.previous else ([], [])
    items = await store.resolved(tenant.name, asked.items)
    exchange = _Exchange(store, tenant.name, asked, [item for item, _ in items], path)
    past = [(item, "previous_response_id") for item in history]
    conversation, places = await _conversation(store, tenant.name, asked, [*past, *items])
    turn_request = TurnRequest(
        tenant=tenant,
        session=record.session,
        conversation=conversation,
        sampling=asked.sampling,
        single_call=asked.single_call,
        ttl=read_retention(fields),
        stream=asked.stream,
        priority=priority_of(fields.values.get("service_tier")),
    )
    try:
        turn = await start_turn(request, turn_request)
    except InvalidRequest as error:
        raise relocated(error, places) from None
    seal = await store.seals.of(tenant.name) if asked.sealed else None
    answer = ResponsesAnswer(turn.prompt.turn, model, asked, service.tokenizer, seal)
    headers = {}
    if asked.tools.left_out:
        headers["x-longhaul-left-out"] = ", ".join(asked.tools.left_out)
    if asked.stream:
        return streamed_answer(request, turn, _events(turn, answer, exchange, record), headers)
    body = await whole_answer(request, turn, _whole(turn, answer, exchange))
    return JsonResponse(body, headers={**turn_headers(turn.prompt), **headers})


async def get_response(request: Request) -> Response:
    """Answer `GET /v1/responses/{id}`."""
    tenant = authenticate(request)
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("stream: a response that is complete can't be streamed again.", param="stream")
    stored = await service_of(request).responses.get(tenant.name, request.path_params["id"])
    return JsonResponse(stored.body)


async def delete_response(request: Request) -> Response:
    """Answer `DELETE /v1/responses/{id}`: the response is gone, its turn in the ledger stays."""
    tenant, id = authenticate(request), request.path_params["id"]
    await service_of(request).responses.delete(tenant.name, id)
    return JsonResponse({"id": id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """Answer `POST /v1/responses/{id}/cancel`: the engine's work on a response under way is aborted."""
    tenant, id = authenticate(request), request.path_params["id"]
    store = service_of(request).responses
    turn = store.running.get((tenant.name, turn_of_response(id) or ""))
    if turn is None:
        await store.get(tenant.name, id)
        raise InvalidRequest("response_id: is complete, and can't be cancelled.", param="response_id")
    await turn.cancel()
    return JsonResponse({"id": id, "object": "response", "status": "cancelled"})


async def list_input_items(request: Request) -> Response:
    """Answer `GET /v1/responses/{id}/input_items`, with `limit`, `order` and `after`."""
    tenant = authenticate(request)
    query = request.query_params
    limit, order = _page_size(query.get("limit")), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc.", param="order")
    stored = await service_of(request).responses.get(tenant.name, request.path_params["id"])
    items = stored.input if order == "asc" else stored.input[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after: is not the id of an item of this response.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return JsonResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _page_size(limit: str | None) -> int:
    values = {} if limit is None else {"limit": int(limit) if limit.isdecimal() and len(limit) < 9 else limit}
    return Fields(values).integer("limit", 1, MAX_LISTED) or _LISTED


async def _conversation(
    store: ResponseStore, tenant: str, asked: ResponsesRequest, items: Sequence[tuple[Item, str]]
) -> tuple[Conversation, list[str]]:
    """The conversation, and for each of its messages the place in the request."""
    sealed = any(item.get("encrypted_content") for item, _ in items)
    seal = await store.seals.of(tenant) if sealed else None
    pairs = list(messages_of(items, seal.open if seal is not None else lambda _: None))
    if asked.instructions:
        pairs.insert(0, ({"role": "system", "content": asked.instructions}, "instructions"))
    if not pairs:  # all of it referred to reasoning that is gone
        raise InvalidRequest("input: refers to nothing that is kept: send the items.", param="input")
    conversation = Conversation(
        messages=tuple(message for message, _ in pairs),
        tools=asked.tools.declared,
        thinking=asked.thinking,
        effort=asked.effort,
        tool_choice=asked.tool_choice,
        response_format=asked.response_format,
    )
    return conversation, [place for _, place in pairs]


async def _whole(turn: Turn, answer: ResponsesAnswer, exchange: _Exchange) -> dict[str, Any]:
    running = exchange.store.running
    key = (exchange.tenant, turn.prompt.turn)
    running[key] = turn
    try:
        async for step in turn:
            for _ in answer.events(step):
                pass
    except ServiceError:
        if turn.cancelled:
            return answer.cancelled()
        raise
    finally:
        del running[key]
    assert turn.completion is not None, "the steps end with the completion"
    for _ in answer.last_events(turn.completion):
        pass
    body = answer.body(turn.completion)
    await exchange.keep(turn, body)
    return body


async def _events(
    turn: Turn, answer: ResponsesAnswer, exchange: _Exchange, record: Record
) -> AsyncGenerator[bytes]:
    running = exchange.store.running
    key = (exchange.tenant, turn.prompt.turn)
    running[key] = turn
    try:
        yield b"".join(map(_event, answer.first_events()))
        async for step in turn:
            if events := b"".join(map(_event, answer.events(step))):
                yield events
    except ServiceError as error:
        record.error = "cancelled" if turn.cancelled else error.code or error.kind
        yield _event(answer.cancellation() if turn.cancelled else answer.failure(error))
        return
    finally:
        del running[key]
    assert turn.completion is not None, "the steps end with the completion"
    closing = b"".join(map(_event, answer.last_events(turn.completion)))
    body = answer.body(turn.completion)
    await exchange.keep(turn, body)
    yield closing + _event(answer.ending(body))


def _event(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
