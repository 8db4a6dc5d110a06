"""The gateway as an ASGI application: routes, errors in the API's shape, what runs beside the requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from service import health, messages_answer
from service.access import STATUS_CLIENT_LEFT, AccessLog, record_of
from service.chat import chat_completions
from service.chat_answer import error_body
from service.errors import MethodNotAllowed, NotFound, ServiceError
from service.messages import count_tokens, messages
from service.openapi import openapi
from service.responses import (
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from service.sessions import erase_session, show_session
from service.stream import ClientLeft
from service.web import JsonResponse, Service

log = logging.getLogger(__name__)

ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{id}", get_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/sessions/{id:path}", show_session, methods=["GET"]),
    Route("/v1/sessions/{id:path}", erase_session, methods=["DELETE"]),
    Route("/v1/models", health.models),
    Route("/v1/models/{id:path}", health.model),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
    Route("/openapi.json", openapi),
)


def build_app(service: Service) -> ASGIApp:
    """The application around one service, which is closed when the application ends."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        watching = asyncio.create_task(service.watch.run())
        try:
            yield
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await service.engines.close()
            await service.runner.close()
            await service.ledger.close()

    app = Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        exception_handlers={
            ServiceError: _service_error,
            HTTPException: _http_exception,
            ClientLeft: _client_left,
            ClientDisconnect: _client_left,
            Exception: _unforeseen,
        },
    )
    app.state.service = service
    return AccessLog(app, service.metrics, frozenset(route.path for route in ROUTES))


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    record_of(request.scope).error = error.code or error.kind
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    status, body = _answer(request, error)
    return JsonResponse(body, status_code=status, headers=headers)


def _answer(request: Request, error: ServiceError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the shape of the API that was asked."""
    if request.url.path.startswith("/v1/messages"):
        body = messages_answer.error_body(error, record_of(request.scope).request_id)
        return messages_answer.error_status(error), body
    return error.status, error_body(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == MethodNotAllowed.status:
        return await _service_error(request, MethodNotAllowed(f"{what[:200]} is not allowed here."))
    return await _service_error(request, NotFound(f"There is no {what[:200]} here.", code="unknown_url"))


async def _client_left(request: Request, _: Exception) -> Response:
    record_of(request.scope).error = "client_left"
    return Response(status_code=STATUS_CLIENT_LEFT)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """Starlette raises the error again behind this answer, and uvicorn logs it."""
    record_of(request.scope).error = type(error).__name__
    status, body = _answer(request, ServiceError("The gateway failed. Its log says why."))
    return JsonResponse(body, status_code=status)
