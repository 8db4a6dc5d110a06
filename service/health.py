"""The routes that ask about the service itself: health, readiness, metrics, models."""

from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from service.errors import NotFound
from service.web import JsonResponse, authenticate, service_of

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(_: Request) -> Response:
    """200 as long as the process answers."""
    return PlainTextResponse("ok\n")


async def ready(request: Request) -> Response:
    """200 when a turn can be served and its prompt trusted, with the state of every part.

    The ledger does not count: without it turns are served, only not continued.
    """
    service = service_of(request)
    watch = service.watch
    ledger = await service.ledger.ping()
    engine = await service.engines.ready()
    is_ready = engine and watch.verified is True
    body = {
        "ready": is_ready,
        "engine": {"ready": engine},
        "engines": {each.name: {"ready": each.available} for each in service.engines.engines},
        "encoding": {"verified": watch.verified, "mismatches": list(watch.mismatches)},
        "ledger": {"ready": ledger},
    }
    return JsonResponse(body, status_code=200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Our series and the engine's; ours alone when it is down."""
    service = service_of(request)
    return Response(service.metrics.page() + await service.engines.metrics(), media_type=_METRICS_TYPE)


async def models(request: Request) -> Response:
    """The one model there is, in OpenAI's list."""
    authenticate(request)
    return JsonResponse({"object": "list", "data": [await _model(request)]})


async def model(request: Request) -> Response:
    """One model by its name. Raises NotFound."""
    authenticate(request)
    found = await _model(request)
    asked = str(request.path_params["id"])
    if asked != found["id"]:
        raise NotFound(
            f"The model {asked[:100]!r} does not exist. This service has {found['id']!r}.",
            param="model",
            code="model_not_found",
        )
    return JsonResponse(found)


async def _model(request: Request) -> dict[str, Any]:
    info = await service_of(request).engines.info()
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "longhaul",
        "max_model_len": info.context_tokens,
    }
