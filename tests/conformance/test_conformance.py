"""Real clients against the real service: three turns with tools each, and no turn loses its prefix.

`make conformance` installs the clients and runs this. The table of what came out is written to
`.state/conformance.md`; the one in README.md here is a copy of it.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from clients import CLIENTS, TURNS

from cache_store.servers import RedisServer, Role
from model.state import state_directory

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]

PAGE_TOKENS = 64
ROOT = Path(__file__).parents[2]
PYTHON = state_directory() / "conformance/bin/python"


class Engine(Protocol):
    """What the session's engine fixture offers."""

    url: str


@pytest.fixture(scope="session")
def service(engine: Engine, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway's command before the real engine, with a ledger of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    directory = tmp_path_factory.mktemp("conformance")
    with RedisServer(Role.LEDGER, directory / "ledger") as ledger, (directory / "log").open("wb") as log:
        argv = [sys.executable, "-m", "service.cli", "gateway", "--port", str(port), "--engine", engine.url]
        argv += ["--ledger", ledger.url, "--model", str(checkpoint)]
        process = subprocess.Popen(argv, cwd=ROOT, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 60
            while not _is_ready(url):
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture(scope="session")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    head = [
        "| client | version | API | turns | prompt tokens | continued tokens | cached tokens | ends |",
        "|---|---|---|---|---|---|---|---|",
    ]
    path = state_directory() / "conformance.md"
    path.write_text("\n".join([*head, *rows]) + "\n")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tool_loop(service: str, table: list[str], client: str) -> None:
    assert PYTHON.exists(), "the clients are not installed: run `make conformance`"
    session = f"{client} {time.time_ns()}"
    command = [str(PYTHON), str(Path(__file__).parent / "clients.py"), client, service, session]
    # No proxy, and no look for updates or telemetry: the service is all there is.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "NO_PROXY": "*",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = httpx.get(f"{service}/v1/sessions/{session}", trust_env=False).json()
    turns: list[dict[str, Any]] = answer["turns"]
    prompts = [turn["prompt_tokens"] for turn in turns]
    continued = [turn["prompt_tokens"] - turn["added_tokens"] for turn in turns]
    cached = [sum(turn["cached_tokens"].values()) for turn in turns]
    cells = [
        client,
        json.loads(ran.stdout.splitlines()[-1])["version"],
        CLIENTS[client][0],
        str(len(turns)),
        *(", ".join(map(str, numbers)) for numbers in (prompts, continued, cached)),
        ", ".join(turn["finish_reason"] for turn in turns),
    ]
    table.append(f"| {' | '.join(cells)} |")
    assert len(turns) == TURNS
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * TURNS
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
    for turn in range(1, TURNS):
        seen = prompts[turn - 1] + turns[turn - 1]["completion_tokens"]
        assert continued[turn] >= seen
        assert cached[turn] >= prompts[turn - 1] // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
