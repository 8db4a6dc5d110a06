"""What every API module needs of HTTP: the service's parts, keys, bodies, and the headers of a turn."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cache_store.ledger import Ledger
from model.tokenizer import K3Tokenizer
from service.access import record_of
from service.engine_watch import EngineWatch
from service.engines import Engines
from service.errors import BodyStalled, BodyTooLarge
from service.fields import Fields, parse_object
from service.images import first_image, refusal, replace_images
from service.metrics import Metrics
from service.responses_store import ResponseStore
from service.runner import TurnRunner
from service.signature import Signatures
from service.tenants import Tenant, Tenants
from service.turns import Prompt


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one gateway, as its API modules use them.

    sampling_defaults: for what a request leaves out, from the checkpoint. max_body_bytes: longest body read.
    ping_interval_s: longest silence within a stream. stall_s: how long a client may take nothing of it.
    replace_images: put a text where a conversation has images that no engine can see, instead of refusing it.
    """

    engines: Engines
    watch: EngineWatch
    ledger: Ledger
    runner: TurnRunner
    tenants: Tenants
    tokenizer: K3Tokenizer
    metrics: Metrics
    signatures: Signatures
    responses: ResponseStore
    sampling_defaults: Mapping[str, float]
    max_body_bytes: int = 64 << 20
    ping_interval_s: float = 10.0
    stall_s: float = 300.0
    replace_images: bool = False


class JsonResponse(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return orjson.dumps(content)


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    return request.app.state.service


def authenticate(request: Request) -> Tenant:
    """The tenant of a request, by `Authorization: Bearer` or `x-api-key`. Raises AuthenticationFailed."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    key = credentials.strip() if scheme.lower() == "bearer" else ""
    tenant = service_of(request).tenants.authenticate(key or request.headers.get("x-api-key"))
    record_of(request.scope).tenant = tenant.name
    return tenant


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises BodyTooLarge as soon as it is known to be longer than what is read, BodyStalled when nothing more
    of it comes for as long as a client may take nothing of an answer.
    """
    service = service_of(request)
    limit_bytes = service.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    received = bytearray()
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout(service.stall_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return bytes(received)
            received += chunk
            if len(received) > limit_bytes:
                raise BodyTooLarge(limit_bytes)
    except TimeoutError:
        raise BodyStalled(service.stall_s) from None


async def read_fields(request: Request) -> Fields:
    """The body's JSON object; where no engine has vision, its images are refused or replaced by text.

    Raises as `read_body` and `parse_object`, and InvalidRequest or EngineUnavailable where it has images.
    """
    fields = parse_object(await read_body(request))
    service = service_of(request)
    if (image := first_image(fields.values)) is not None and not (await service.engines.info()).vision:
        if not service.replace_images:
            raise refusal(*image)
        count = replace_images(fields.values)
        record_of(request.scope).replaced_images = count
        service.metrics.replaced_images.inc(count)
    return fields


def turn_headers(prompt: Prompt) -> dict[str, str]:
    """What the answer says about how its prompt came about: the `x-longhaul-*` headers."""
    headers = {
        "x-longhaul-turn": prompt.turn,
        "x-longhaul-continued-tokens": str(prompt.continued_tokens),
        "x-longhaul-restored": f"reasoning={prompt.restored_reasoning}, ids={prompt.restored_ids}",
    }
    optional = {"parent": prompt.parent, "fallback": prompt.fallback, "divergence": prompt.divergence}
    if prompt.images:
        headers["x-longhaul-images"] = str(len(prompt.images))
    for name, value in optional.items():
        if value is not None:
            headers[f"x-longhaul-{name}"] = _header_text(value)
    return headers


def _header_text(text: str) -> str:
    """Text as a header may carry it: visible ASCII and spaces, of bounded length."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:512]
