"""Server-sent events, and noticing that a client has left."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PING: Final = b": ping\n\n"
"""A comment, which every parser of server-sent events skips (WHATWG HTML, section 9.2.6)."""
DONE: Final = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client closed its connection before it had the whole answer."""


def data_event(document: object) -> bytes:
    """One event that carries a JSON document."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def named_event(document: Mapping[str, Any]) -> bytes:
    """One event that carries a JSON document, under the name that the document has for its type."""
    return b"event: " + document["type"].encode() + b"\n" + data_event(document)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, unless the client leaves first: then it is cancelled and ClientLeft is raised.

    The request's body must have been read, so that `receive` has nothing to give but the disconnection.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            # Let it close what it holds before anybody counts it as gone.
            await asyncio.wait({working})
        elif not working.cancelled():
            working.exception()  # it may be nobody else's to retrieve


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer of server-sent events, with pings while `events` is silent.

    A client that takes nothing for `stall_s` counts as gone. `closed` is awaited when the stream has ended,
    and told what would be to blame for a turn that did not: `engine`, `client` or `shutdown`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        headers: Mapping[str, str],
        ping_interval_s: float,
        stall_s: float,
        closed: Callable[[str], Awaitable[None]],
        ping: bytes = PING,
    ) -> None:
        self._events = events
        self._ping_event = ping
        self._stall_s = stall_s
        self._ping_interval_s = ping_interval_s
        self._closed = closed
        self._sent_at = 0.0
        self._pending = 0
        self._stalled = False
        self.status_code = 200
        self.background = None
        # nginx buffers answers of an upstream unless it is told not to.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything (ASGI 3)."""
        cause = "shutdown"
        try:
            await while_connected(receive, self._send_all(send))
            cause = "engine"
        except ClientLeft:
            cause = "client"
        finally:
            await self._closed(cause)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_at = time.monotonic()
        sending = asyncio.current_task()
        assert sending is not None
        watching = asyncio.create_task(self._watch(send, sending))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, event)
        except asyncio.CancelledError:
            if self._stalled:
                raise ClientLeft from None
            raise
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send, sending: asyncio.Task[None]) -> None:
        """Ping while nothing is sent, and end a stream that nobody takes, with one timer for all events."""
        stalled = False
        while not stalled:
            waited_s = time.monotonic() - self._sent_at
            limit_s = self._stall_s if self._pending else self._ping_interval_s
            if waited_s < limit_s:
                # An event may become pending meanwhile: look again as often as either is due.
                await asyncio.sleep(min(limit_s - waited_s, self._ping_interval_s, self._stall_s))
            elif self._pending:
                stalled = True
            else:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await self._send(send, self._ping_event)
                except TimeoutError:
                    stalled = True
        self._stalled = True
        sending.cancel()

    async def _send(self, send: Send, body: bytes) -> None:
        self._sent_at = time.monotonic()
        self._pending += 1
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._pending -= 1
        self._sent_at = time.monotonic()
