"""The gateway as an ASGI application: routes, errors in the API's shape, what runs beside the requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from service import health
from service.access import STATUS_CLIENT_LEFT, AccessLog, record_of
from service.chat import chat_completions
from service.chat_answer import error_body
from service.errors import MethodNotAllowed, NotFound, ServiceError
from service.stream import ClientLeft
from service.web import JsonResponse, Service

log = logging.getLogger(__name__)

ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", health.models),
    Route("/v1/models/{id:path}", health.model),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
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
            await service.engine.close()
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
    return JsonResponse(error_body(error), status_code=error.status, headers=headers)


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
    return JsonResponse(error_body(ServiceError("The gateway failed. Its log says why.")), status_code=500)
