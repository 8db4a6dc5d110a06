"""One request and the turn it starts, as every API module handles them: begun, answered, closed, logged."""

from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from service.access import Record, record_of
from service.errors import NotFound, ServiceError
from service.runner import Turn, TurnRequest
from service.stream import PING, ClientLeft, EventStream, while_connected
from service.web import Service, service_of, turn_headers

T = TypeVar("T")


async def served_model(service: Service, wanted: str | None) -> str:
    """The engine's name for its model. Raises NotFound when another one is wanted, and EngineUnavailable."""
    served = (await service.engines.info()).model
    if wanted is not None and wanted != served:
        raise NotFound(
            f"The model {wanted[:100]!r} does not exist. This service has {served!r}.",
            param="model",
            code="model_not_found",
        )
    return served


async def start_turn(request: Request, turn_request: TurnRequest) -> Turn:
    """Start a turn and note it in the request's record. Raises ServiceError, and ClientLeft."""
    record = record_of(request.scope)
    turn = await while_connected(request.receive, service_of(request).runner.start(turn_request))
    record.turn, record.parent = turn.prompt.turn, turn.prompt.parent
    record.prompt_tokens = len(turn.prompt.ids)
    record.continued_tokens = turn.prompt.continued_tokens
    return turn


async def whole_answer(request: Request, turn: Turn, work: Coroutine[Any, Any, T]) -> T:
    """Do the work that takes all of the turn's steps, and close the turn. Raises as `start_turn`."""
    cause = "shutdown"
    try:
        return await while_connected(request.receive, work)
    except ClientLeft:
        cause = "client"
        raise
    except ServiceError:
        cause = "engine"
        raise
    finally:
        await _close(turn, record_of(request.scope), cause)


def streamed_answer(
    request: Request,
    turn: Turn,
    events: AsyncGenerator[bytes],
    headers: Mapping[str, str] | None = None,
    ping: bytes = PING,
) -> EventStream:
    """The answer that streams events, and closes the turn when it ends; `headers` beside the turn's own."""
    service, record = service_of(request), record_of(request.scope)
    return EventStream(
        events,
        headers={**turn_headers(turn.prompt), **(headers or {})},
        ping_interval_s=service.ping_interval_s,
        stall_s=service.stall_s,
        closed=lambda cause: _close(turn, record, cause),
        ping=ping,
    )


async def _close(turn: Turn, record: Record, cause: str) -> None:
    await turn.close(cause)
    record.ttft_s = turn.ttft_s
    if (completion := turn.completion) is None:
        return
    record.finish, record.recorded = completion.finish, turn.recorded
    record.cached_tokens = completion.usage.cached_tokens
    record.completion_tokens = completion.usage.completion_tokens
