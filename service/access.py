"""One line of log and one count per request, and the request's id.

Logs are JSON, one object a line, on stderr: `time`, `level`, `logger`, `message`, and for a request what is
known of it. Texts of conversations, keys and token ids are never logged.
"""

import logging
import re
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import Metrics

log = logging.getLogger("longhaul.access")

STATUS_CLIENT_LEFT: Final = 499
"""nginx' status for a client that closed its connection: seen in logs and metrics only."""

_SCOPE_KEY: Final = "longhaul.record"
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET_ROUTES: Final = frozenset({"/health", "/ready", "/metrics"})


@dataclass(slots=True)
class Record:
    """What is known of one request when it ends. Counts are tokens, times seconds."""

    request_id: str
    method: str
    route: str
    status: int = 500
    tenant: str = ""
    session: str | None = None
    turn: str | None = None
    parent: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    continued_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    recorded: bool | None = None
    error: str | None = None
    replaced_images: int | None = None
    ttft_s: float | None = None
    duration_s: float = field(default=0.0)


def record_of(scope: Scope) -> Record:
    """The record of the request that a scope belongs to."""
    return scope[_SCOPE_KEY]


class AccessLog:
    """ASGI middleware around the whole application. Paths that are not in `routes` are counted as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._templates = [compile_path(route) for route in sorted(routes) if "{" in route]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI 3)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = Headers(scope=scope).get("x-request-id", "")
        record = Record(
            request_id=sent_id if _REQUEST_ID.fullmatch(sent_id) else f"req_{secrets.token_hex(12)}",
            method=scope["method"],
            route=self._route(scope["path"]),
        )
        scope[_SCOPE_KEY] = record
        started_at = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                # The latter is Anthropic's; its SDKs show it with every error.
                headers["x-request-id"] = headers["request-id"] = record.request_id
                if record.replaced_images:
                    headers["x-longhaul-replaced-images"] = str(record.replaced_images)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.duration_s = time.monotonic() - started_at
            self._finish(record)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        found = (template for pattern, template, _ in self._templates if pattern.match(path))
        return next(found, "other")

    def _finish(self, record: Record) -> None:
        self._metrics.requests.labels(record.route, str(record.status), record.tenant).inc()
        self._metrics.duration.labels(record.route).observe(record.duration_s)
        level = logging.DEBUG if record.route in _QUIET_ROUTES else logging.INFO
        known = {name: value for name, value in asdict(record).items() if value not in (None, "")}
        log.log(level, "%s %s %d", record.method, record.route, record.status, extra={"fields": known})


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record; `fields` in its extras stand beside the message."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
