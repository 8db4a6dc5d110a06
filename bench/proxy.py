"""A plain reverse proxy: bytes in, bytes out. The least that anything between a client and an engine costs.

python -m bench.proxy --upstream http://127.0.0.1:30000 --port 8001
"""

import argparse
import sys
from collections.abc import AsyncGenerator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def build_proxy(upstream: str) -> Starlette:
    """The proxy to `upstream` as an ASGI application."""
    client = httpx.AsyncClient(base_url=upstream, timeout=600, trust_env=False)

    async def passed_on(request: Request) -> Response:
        asked = client.build_request(request.method, request.url.path, content=await request.body())
        answer = await client.send(asked, stream=True)

        async def chunks() -> AsyncGenerator[bytes]:
            async for chunk in answer.aiter_raw():
                yield chunk

        return StreamingResponse(
            chunks(),
            status_code=answer.status_code,
            media_type=answer.headers.get("content-type"),
            background=BackgroundTask(answer.aclose),
        )

    return Starlette(routes=[Route("/{path:path}", passed_on, methods=["GET", "POST"])])


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m bench.proxy", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="URL", help="where requests go")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on (%(default)s)")
    args = parser.parse_args()
    uvicorn.run(
        build_proxy(args.upstream),
        host="127.0.0.1",
        port=args.port,
        log_config=None,
        access_log=False,
        loop="uvloop",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
