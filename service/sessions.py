"""`GET` and `DELETE /v1/sessions/{id}`: a session's recorded turns, shown and erased.

A session is what its client calls by that name (`service.identity`), within its tenant. Its turns are those
of requests that named it, and of requests that named none and continued one of them. Erasing takes the turns,
their places in the ledger's lists, and the responses stored beside them. What the engine and the store hold
of a session are pages under hashes of tokens, which name nobody and expire by themselves.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cache_store.ledger import LedgerUnavailable
from cache_store.turn import Turn
from service.access import record_of
from service.errors import LedgerDown, NotFound
from service.web import JsonResponse, authenticate, service_of


async def show_session(request: Request) -> Response:
    """The newest 1,024 turns of a session, oldest first. Raises NotFound, LedgerDown."""
    tenant, id = authenticate(request), _id(request)
    try:
        turns = await service_of(request).ledger.session(tenant.name, id)
    except LedgerUnavailable:
        raise LedgerDown from None
    if not turns:
        raise _unknown(id)
    return JsonResponse({"id": id, "object": "session", "turns": [_turn_body(turn) for turn in turns]})


async def erase_session(request: Request) -> Response:
    """Erase a session. Raises NotFound, LedgerDown; after the latter it may be asked for again."""
    tenant, id = authenticate(request), _id(request)
    try:
        erased = await service_of(request).ledger.erase_session(tenant.name, id)
    except LedgerUnavailable:
        raise LedgerDown from None
    if not erased:
        raise _unknown(id)
    return JsonResponse({"id": id, "object": "session.deleted", "deleted": True, "turns": erased})


def _id(request: Request) -> str:
    record_of(request.scope).session = id = request.path_params["id"]
    return id


def _turn_body(turn: Turn) -> dict[str, Any]:
    prompt, completion, reasoning, device, host, storage = turn.usage
    return {
        "id": turn.key,
        "parent": turn.parent,
        "created_at": turn.created_ms // 1000,
        "messages": turn.messages,
        "finish_reason": turn.finish,
        "tool_calls": [{"id": id, "name": name} for id, name, _ in turn.calls],
        "added_tokens": len(turn.prompt),
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "reasoning_tokens": reasoning,
        "cached_tokens": {"device": device, "host": host, "storage": storage},
        "ttl": turn.ttl,
    }


def _unknown(id: str) -> NotFound:
    return NotFound(
        f"There is no session {id[:100]!r}: none of its turns is recorded, or all have expired.",
        param="id",
        code="session_not_found",
    )
