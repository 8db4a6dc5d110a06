"""What an ASGI 3 application written by hand needs: a request's body, and a lifespan that does nothing."""

from collections.abc import Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def lifespan(receive: Receive, send: Send) -> None:
    """Say of start and end that they are complete."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
