"""How many live sessions one replay process holds: how late requests leave, and what they cost in CPU.

An endpoint in a process of its own streams fixed answers at once, so that what is measured is the client:
`python -m bench.live_sessions [--sessions 1000] [--turns 6] [--context 18000] [--gap 10] [--json]`.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import uvicorn
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from replay.calibration import measure
from replay.client import ChatClient
from replay.layout import Planner
from replay.report import distribution, make_report
from replay.run import Replay
from replay.scale import Scale
from replay.schedule import Pace, SystemClock
from replay.trace import Agent, Request, Session

OUTPUT_TOKENS = 8
OVERHEAD_TOKENS = 5


def serve(listener: socket.socket, ready: multiprocessing.connection.Connection) -> None:
    """Serve the endpoint on a bound socket until the process is ended."""

    async def complete(request: HttpRequest) -> Response:
        body = orjson.loads(await request.body())
        # Words are a space and letters, a token each.
        words = sum(message["content"].count(" ") + OVERHEAD_TOKENS for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": body["max_completion_tokens"]}
        if not body.get("stream"):
            return JSONResponse({"choices": [], "usage": usage})

        async def events() -> AsyncIterator[bytes]:
            for document in ({"choices": [{"delta": {"content": "x"}}]}, {"choices": [], "usage": usage}):
                yield b"data: " + orjson.dumps(document) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"data": [{"id": "fixed", "max_model_len": 1_000_000}]})

    app = Starlette(
        routes=[Route("/v1/chat/completions", complete, methods=["POST"]), Route("/v1/models", models)]
    )
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=300, backlog=4096)
    ready.send(True)
    uvicorn.Server(config).run(sockets=[listener])


def made_sessions(count: int, turns: int, context_tokens: int, gap_s: float) -> list[Session]:
    """Sessions whose prompts grow by a twentieth a turn, all turns `gap_s` apart, begun over one gap."""
    sessions: list[Session] = []
    for number in range(count):
        offset_s = gap_s * number / count
        requests = [
            Request(
                offset_s + turn * gap_s,
                0.0,
                tokens := context_tokens + turn * context_tokens // 20,
                OUTPUT_TOKENS,
                tuple(range(tokens // 64)),
            )
            for turn in range(turns)
        ]
        root = Agent("root", 0, tuple(requests), 0.0, requests[-1].start_s)
        sessions.append(Session(f"s{number}", 64, (root,)))
    return sessions


async def replay(url: str, sessions: list[Session]) -> dict[str, Any]:
    """Run all sessions at once; the figures."""
    async with ChatClient(url) as client:
        await client.connect(None)
        words, calibration = await measure(client, None, 0)
        run = Replay(
            client=client,
            planner=Planner(Scale(), calibration.overhead),
            words=words,
            pace=Pace(),
            clock=SystemClock(),
            concurrency=len(sessions),
            seed=0,
            on_record=lambda record: None,
        )
        begin, begin_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        await run.run(sessions)
        end, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begin_s
    report = make_report(run.records)
    # First turns wait for the text of a whole prompt of every session, which all are made at the start.
    late = distribution(record.lateness_s for record in run.records if record.turn)
    assert late is not None, "sessions have at least two turns"
    cpu_s = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    return {
        "sessions": len(sessions),
        "requests": report.total.turns,
        "errors": report.total.errors,
        "largest_input_error": report.total.largest_input_error,
        "prompt_tokens": report.total.input_seen,
        "wall_s": wall_s,
        "requests_per_s": report.total.turns / wall_s,
        "scheduling_error_s": {"p50": late.p50, "p90": late.p90, "p99": late.p99, "max": late.most},
        "cpu_share": cpu_s / wall_s,
        "cpu_ms_per_request": 1000 * cpu_s / report.total.turns,
        "peak_memory_mb": end.ru_maxrss / 1024,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 1 when a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--context", type=int, default=18_000, help="tokens of the first prompt")
    parser.add_argument("--gap", type=float, default=10.0, help="seconds between turns")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.turns < 2:
        parser.error("--turns: must be at least 2")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        server = context.Process(target=serve, args=(listener, sender), daemon=True)
        server.start()
        receiver.recv()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            sessions = made_sessions(args.sessions, args.turns, args.context, args.gap)
            found = uvloop.run(replay(url, sessions))
        finally:
            server.terminate()
            server.join()
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("")
        table.add_column("", justify="right")
        late = found.pop("scheduling_error_s")
        for name, value in {**found, **{f"late by, ms, {k}": v * 1000 for k, v in late.items()}}.items():
            table.add_row(name, f"{value:,.1f}")
        Console().print(table)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
