"""A wire tap between a gateway and an engine: what was asked and what was sampled, token by token.

Bytes pass as they are. What is kept is what the engine itself was given and gave, so nothing that a gateway
says of its prompts has to be believed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from bench.asgi import Receive, Send, body_of, lifespan

_TIMEOUT_S = 600.0
_EVENT = b"data: {"
_JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Generated:
    """One request to `/generate`, and the ids that came of it so far."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list[int])


class EngineTap:
    """An ASGI application that passes on what it is asked. `generated`: by the request's cache salt."""

    def __init__(self, engine_url: str) -> None:
        self.generated: dict[str, list[Generated]] = {}
        self._engine_url = engine_url

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass on one request (ASGI 3)."""
        if scope["type"] != "http":
            await lifespan(receive, send)
            return
        body = await body_of(receive)
        url = httpx.URL(self._engine_url).copy_with(path=scope["path"], query=scope["query_string"])
        kept = self._kept(scope["path"], body)
        async with (
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=False) as client,
            client.stream(scope["method"], url, content=body, headers=_JSON) as answer,
        ):
            content_type = answer.headers.get("content-type", "application/json").encode()
            headers = [(b"content-type", content_type)]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            rest = b""
            async for chunk in answer.aiter_bytes():
                if kept is not None:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.startswith(_EVENT):
                            event = orjson.loads(line.removeprefix(b"data: "))
                            kept.sampled += event.get("output_ids") or ()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _kept(self, path: str, body: bytes) -> Generated | None:
        if path != "/generate":
            return None
        request = orjson.loads(body)
        kept = Generated(request["input_ids"])
        self.generated.setdefault(request.get("cache_salt") or "", []).append(kept)
        return kept
