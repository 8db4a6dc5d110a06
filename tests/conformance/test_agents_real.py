"""Claude Code, Codex and opencode themselves in tool loops against the real service: nothing stands in.

`longhaul serve` answers with the small K3 and its draft on this CPU. The agents get short prompts, and their
tool from an MCP server (`harbor_server.py`), all through their own configuration; the model decides what is
called. `make conformance` installs the agents; the table of what came out is written to
`.state/conformance-agents-real.md`, and the one in README.md here is a copy of it. The agents' own prompts
and shells are tested in `../service/test_coding_agents.py`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.engines import free_port
from model.state import state_directory
from service.stack import CPU_START_TIMEOUT_S

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]

PAGE_TOKENS = 64
ROOT = Path(__file__).parents[2]
INSTALLED = state_directory().absolute() / "conformance"
RUN_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
SERVER_NAME = "lookup"
"""The agents put it before the tool's name. Tools in the model's training are named `VERB_NOUN`: a name that
begins with a verb, it copies without a slip."""
PROMPT = "Use the tools."


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks, in words of the model's training, which calls must follow, and how turns must end.

    Every harbor of `looked_up` is one call; the answer must hold `field` of `harbors`.
    """

    text: str
    field: str
    harbors: tuple[str, ...]
    looked_up: tuple[str, ...]
    ends: tuple[str, ...]


QUESTIONS = (
    Question(
        "What is the temperature of harbor Oslo?", "temperature", ("Oslo",), ("Oslo",), ("tool_calls", "stop")
    ),
    # Busy at first: an error, the same call again, an answer; three turns of one loop.
    Question(
        "What is the depth of harbor Bergen?",
        "depth",
        ("Bergen",),
        ("Bergen", "Bergen"),
        ("tool_calls", "tool_calls", "stop"),
    ),
    Question(
        "What is the temperature of harbor Oslo and Lisbon?",
        "temperature",
        ("Oslo", "Lisbon"),
        ("Oslo", "Lisbon"),
        ("tool_calls", "stop"),
    ),
    Question(
        "Earlier you looked up the harbor Oslo. What was the temperature? Do not look again.",
        "temperature",
        ("Oslo",),
        (),
        ("stop",),
    ),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an agent once."""

    argv: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent: its command, the API that it speaks, how to configure and start it, and how to read it.

    launch: (the service's URL, the agent's home and working directory, the MCP server's command, the session
    to resume or None, the question). read: its output to (the session's id, the answer).
    """

    binary: str
    api: str
    launch: Callable[[str, Path, list[str], str | None, str], Launch]
    read: Callable[[str], tuple[str, str]]


def launch_claude_code(url: str, home: Path, server: list[str], session: str | None, question: str) -> Launch:
    servers = {"mcpServers": {SERVER_NAME: {"command": server[0], "args": server[1:]}}}
    (home / "mcp.json").write_text(json.dumps(servers))
    argv = ["claude", *(["--resume", session] if session else []), "--system-prompt", PROMPT, "--tools", ""]
    argv += ["--mcp-config", "mcp.json", "--strict-mcp-config"]
    argv += ["--allowedTools", f"mcp__{SERVER_NAME}__get_harbor", "--output-format", "json", "-p", question]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "kimi-k3",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "kimi-k3",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
    }
    return Launch(argv, environment)


def read_claude_code(output: str) -> tuple[str, str]:
    result = json.loads(output)
    return result["session_id"], result["result"]


CODEX_FEATURES = (
    "apps",
    "browser_use",
    "computer_use",
    "goals",
    "hooks",
    "image_generation",
    "in_app_browser",
    "plugins",
    "shell_snapshot",
    "shell_tool",
    "skill_search",
    "sleep_tool",
    "tool_search_always_defer_mcp_tools",
    "tool_suggest",
    "unified_exec",
    "view_image",
)
"""What Codex is told to leave out: tools, and texts about them."""


def launch_codex(url: str, home: Path, server: list[str], session: str | None, question: str) -> Launch:
    (home / ".codex").mkdir(exist_ok=True)
    (home / "instructions.md").write_text(PROMPT)
    switches = "\n".join(f"{feature} = false" for feature in CODEX_FEATURES)
    configuration = f"""
        model = "kimi-k3"
        model_provider = "longhaul"
        model_context_window = 32000
        model_instructions_file = "{home}/instructions.md"
        include_apps_instructions = false
        include_collaboration_mode_instructions = false
        include_environment_context = false
        include_permissions_instructions = false
        project_doc_max_bytes = 0
        web_search = "disabled"
        [agents]
        enabled = false
        [skills]
        include_instructions = false
        [features]
        {switches}
        [model_providers.longhaul]
        name = "longhaul"
        base_url = "{url}/v1"
        env_key = "LONGHAUL_KEY"
        wire_api = "responses"
        [mcp_servers.{SERVER_NAME}]
        command = "{server[0]}"
        args = {json.dumps(server[1:])}
        """
    (home / ".codex/config.toml").write_text(configuration)
    argv = ["codex", "exec", *(["resume", session] if session else []), "--json", "--skip-git-repo-check"]
    argv += ["--dangerously-bypass-approvals-and-sandbox", question]
    return Launch(argv, {"LONGHAUL_KEY": "k"})


def read_codex(output: str) -> tuple[str, str]:
    events = [json.loads(line) for line in output.splitlines()]
    sessions = [event["thread_id"] for event in events if event["type"] == "thread.started"]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return sessions[0], "\n".join(item["text"] for item in items if item["type"] == "agent_message")


def launch_opencode(url: str, home: Path, server: list[str], session: str | None, question: str) -> Launch:
    agent = {"mode": "primary", "prompt": PROMPT, "tools": {"*": False, f"{SERVER_NAME}*": True}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "k"},
        "models": {"kimi-k3": {"limit": {"context": 32_000, "output": 1_000}}},
    }
    configuration = {
        "model": "longhaul/kimi-k3",
        "small_model": "longhaul/kimi-k3",
        "autoupdate": False,
        "provider": {"longhaul": provider},
        "agent": {"harbors": agent},
        "mcp": {SERVER_NAME: {"type": "local", "command": server, "enabled": True}},
    }
    (home / "opencode.json").write_text(json.dumps(configuration))
    argv = ["opencode", "run", *(["--session", session] if session else []), "--agent", "harbors"]
    # An argument with spaces would reach the model in quotes.
    return Launch([*argv, "--format", "json", *question.split()], {})


def read_opencode(output: str) -> tuple[str, str]:
    events = [json.loads(line) for line in output.splitlines()]
    texts = [event["part"]["text"] for event in events if event["type"] == "text"]
    return events[0]["sessionID"], "\n".join(texts)


AGENTS = {
    "Claude Code": Agent("claude", "Messages", launch_claude_code, read_claude_code),
    "Codex": Agent("codex", "Responses", launch_codex, read_codex),
    "opencode": Agent("opencode", "Chat", launch_opencode, read_opencode),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`longhaul serve`, as by default on a CPU: the small K3 with its draft."""
    directory = tmp_path_factory.mktemp("agents")
    port, engine_port = free_port(), free_port()
    argv = [sys.executable, "-m", "service.cli", "serve", "--profile", "cpu-tiny"]
    argv += ["--state-dir", str(directory / "state"), "--port", str(port), "--engine-port", str(engine_port)]
    url = f"http://127.0.0.1:{port}"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + CPU_START_TIMEOUT_S
            while not _is_ready(url):
                assert process.poll() is None and time.monotonic() < deadline, (directory / "log").read_text()
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    head = [
        "| agent | API | turns | calls executed | prompt tokens | continued tokens | cached tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    (state_directory() / "conformance-agents-real.md").write_text("\n".join([*head, *rows]) + "\n")


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_true_answers(service: str, table: list[str], tmp_path: Path, name: str) -> None:
    agent = AGENTS[name]
    harbors: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("harbors.json").read_text())
    calls = tmp_path / "calls.jsonl"
    calls.touch()
    server = [str(INSTALLED / "bin/python"), str(Path(__file__).with_name("harbor_server.py")), str(calls)]
    session: str | None = None
    for question in QUESTIONS:
        launch = agent.launch(service, tmp_path, server, session, question.text)
        known, answer = agent.read(execute(launch.argv, tmp_path, launch.environment))
        assert session in (None, known)
        session = known
        for harbor in question.harbors:
            verb = "is" if question.looked_up else "was"
            assert f"The {question.field} of {harbor} {verb} {harbors[harbor][question.field]}." in answer
    executed = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [call["name"] for call in executed] == [h for question in QUESTIONS for h in question.looked_up]
    turns: list[dict[str, Any]] = httpx.get(f"{service}/v1/sessions/{session}", trust_env=False).json()[
        "turns"
    ]
    version = execute([agent.binary, "--version"], tmp_path, {}).split()
    table.append(row(f"{name} {next(w for w in version if w[0].isdigit())}", agent.api, executed, turns))
    check_turns(turns)


def check_turns(turns: Sequence[dict[str, Any]]) -> None:
    """Each turn continues the one before with all of its tokens, and the engine has them cached."""
    assert [turn["finish_reason"] for turn in turns] == [
        end for question in QUESTIONS for end in question.ends
    ]
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
    for before, turn in pairwise(turns):
        seen = before["prompt_tokens"] + before["completion_tokens"]
        assert turn["prompt_tokens"] - turn["added_tokens"] == seen
        # The last token that was sampled has not been through the model.
        assert sum(turn["cached_tokens"].values()) >= (seen - 1) // PAGE_TOKENS * PAGE_TOKENS


def row(name: str, api: str, executed: Sequence[object], turns: Sequence[dict[str, Any]]) -> str:
    """A line of the table."""
    columns = (
        [turn["prompt_tokens"] for turn in turns],
        [turn["prompt_tokens"] - turn["added_tokens"] for turn in turns],
        [sum(turn["cached_tokens"].values()) for turn in turns],
    )
    cells = [name, api, str(len(turns)), str(len(executed))]
    return f"| {' | '.join([*cells, *(', '.join(map(str, column)) for column in columns)])} |"


def execute(command: list[str], home: Path, environment: dict[str, str]) -> str:
    """Run an installed agent in a home of its own, and give what it printed."""
    binary = INSTALLED / "node_modules/.bin" / command[0]
    assert binary.exists(), f"{command[0]} is not installed: run `make conformance`"
    ran = subprocess.run(
        [str(binary), *command[1:]],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "*", **environment},
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-2000:])
    return ran.stdout
