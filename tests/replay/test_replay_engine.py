"""The replay against the whole service with the real engine on this CPU."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
REPLAY_TIMEOUT_S = 400
PAGE = 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The URL of `longhaul serve` on free ports, with a state directory of its own."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "service.cli", "serve", "--json", "--port", str(port)),
            *("--engine-port", str(free_port()), "--state-dir", str(tmp_path_factory.mktemp("state"))),
        ],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{"), "the service did not become ready"
        yield f"http://127.0.0.1:{port}"
    finally:
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(120) is not None


def replay(*arguments) -> dict:
    process = subprocess.run(
        [sys.executable, "-m", "service.cli", "replay", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=REPLAY_TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_recorded_sessions_hit_what_the_engines_pages_allow(service, traces, tmp_path):
    output = tmp_path / "replay.json"
    document = replay(
        traces, "--url", service, "--scale", "1/8", "--max-turns", 6, "--time-scale", 0.01, "--output", output
    )
    total = document["total"]
    assert total["turns"] == 6 + 3 + 3 + 6 + 6 and total["errors"] == 0
    assert total["output_seen"] == total["output_requested"]
    assert sum(total["tiers"].values()) == total["cached_tokens"]
    rows = json.loads(output.read_text())["requests"]
    # A part too short for a message is left out or lengthened: the plan may miss the trace, not the prompt.
    assert all(row["input_seen"] == row["input_planned"] for row in rows)
    assert abs(total["input_seen"] - total["input_requested"]) < 0.001 * total["input_requested"]
    assert all(row["cached_tokens"] % PAGE == 0 for row in rows)
    # What two prompts share lies within one page of what the engine may restore.
    assert all(row["cached_tokens"] < row["prefix_tokens"] + PAGE for row in rows)
    assert total["hit_ratio"] > 0.9
