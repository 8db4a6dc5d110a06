"""Claude Code, Codex, opencode and the AI SDK themselves, each in three turns with its own tools.

Their prompts are longer than the tiny model's context, and a random model would not call their tools: so the
engine is the stand-in, and what is tested is everything before it. `make conformance` installs the agents;
the table of what came out is written to `.state/conformance-agents.md`.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_engine as stand_in
import pytest
from conftest import Gateway, GatewayFactory
from fake_engine import Event, FakeEngine, event, reply_ids

from model.state import state_directory

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]

CONTEXT_TOKENS = 400_000
TURNS = 3
BINARIES = state_directory().absolute() / "conformance/node_modules/.bin"
TOOLS: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "say it"},
    "bash": lambda command: {"command": command, "description": "say it"},
    "exec_command": lambda command: {"cmd": command},
    "set_lamp": lambda command: {"room": command, "level": 3},
}


def calling_twice(engine: FakeEngine) -> stand_in.Script:
    """Think, speak and call the shell in two turns, then end; whoever declares no shell gets the end."""

    async def script(request: Mapping[str, Any]) -> AsyncIterator[Event]:
        prompt = engine.tokenizer.decode(request["input_ids"])
        answered = prompt.count('message role="tool" tool=')
        tool = next((name for name in TOOLS if f'"name":"{name}"' in prompt), None)
        message: dict[str, Any] = {"reasoning_content": f"Thought {answered}.", "content": "All done."}
        if tool is not None and answered < TURNS - 1:
            arguments = json.dumps(TOOLS[tool](f"echo step-{answered}"))
            function = {"name": tool, "arguments": arguments}
            message |= {
                "content": "Let me check.",
                "tool_calls": [{"id": "x", "type": "function", "function": function}],
            }
        ids = reply_ids(engine.tokenizer, message)
        for start in range(0, len(ids), 5):
            last = start + 5 >= len(ids)
            yield event(ids[start : start + 5], {"type": "stop", "matched": ids[-1]} if last else None)
            await asyncio.sleep(0)

    return script


def claude_code(url: str, directory: Path, again: bool) -> tuple[list[str], dict[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "k",
        "ANTHROPIC_MODEL": "kimi-k3",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "kimi-k3",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return ["claude", *(["--continue"] if again else []), "--allowedTools", "Bash", "-p"], environment


def codex(url: str, directory: Path, again: bool) -> tuple[list[str], dict[str, str]]:
    provider = f'model_providers.lh={{name="lh",base_url="{url}/v1",env_key="LH_KEY",wire_api="responses"}}'
    options = ["-m", "kimi-k3", "-c", "model_provider=lh", "-c", provider, "--skip-git-repo-check"]
    options.append("--dangerously-bypass-approvals-and-sandbox")
    return ["codex", "exec", *(["resume", "--last"] if again else []), *options], {"LH_KEY": "k"}


def opencode(url: str, directory: Path, again: bool) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "k"},
        "models": {"kimi-k3": {}},
    }
    configuration = {
        "model": "lh/kimi-k3",
        "small_model": "lh/kimi-k3",
        "autoupdate": False,
        "provider": {"lh": provider},
    }
    (directory / "opencode.json").write_text(json.dumps(configuration))
    return ["opencode", "run", *(["--continue"] if again else [])], {}


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = ["| agent | API | prompt tokens | continued tokens |", "|---|---|---|---|"]
    yield rows
    (state_directory() / "conformance-agents.md").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("agent", [claude_code, codex, opencode])
async def test_an_agent_keeps_its_prefix(
    fake_engine: FakeEngine,
    gateway_factory: GatewayFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    table: list[str],
    agent: Any,
):
    monkeypatch.setattr(stand_in, "CONTEXT_TOKENS", CONTEXT_TOKENS)
    fake_engine.server_info["max_req_input_len"] = CONTEXT_TOKENS - 6
    async with gateway_factory() as gateway:
        gateway.engine.script = calling_twice(gateway.engine)
        output = await run(agent, gateway, tmp_path, "run echo hi", again=False)
        assert "All done." in output
        output = await run(agent, gateway, tmp_path, "and now say goodbye", again=True)
        assert "All done." in output
        prompts, answers = await exchanged(gateway, TURNS + 1)
        version = await run(agent, gateway, tmp_path, "--version", again=None)
        api = {"claude_code": "Messages", "codex": "Responses", "opencode": "Chat"}[agent.__name__]
        continued = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)][:-1]
        cells = [f"{agent.__name__} {version.strip()}", api, listed(map(len, prompts)), listed(continued)]
        table.append(f"| {' | '.join(cells)} |")


@pytest.mark.parametrize("mode", ["stream", "whole"])
async def test_the_ai_sdk_keeps_its_prefix(gateway: Gateway, mode: str):
    gateway.engine.script = calling_twice(gateway.engine)
    script = BINARIES.parent.parent / "ai_sdk.mjs"
    assert script.exists(), "the AI SDK is not installed: run `make conformance`"
    output = await execute(["node", str(script), gateway.url, mode], script.parent, {})
    assert output.endswith("All done.")
    await exchanged(gateway, TURNS)


async def exchanged(gateway: Gateway, turns: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts that declare tools, and what was sampled for them; each must extend what was before."""
    prompts = [
        request["input_ids"]
        for request in gateway.engine.requests
        if "tool-declare" in gateway.engine.tokenizer.decode(request["input_ids"][:20])
    ]
    assert len(prompts) == turns
    answers = await sampled(gateway, prompts)
    for before, answer, after in zip(prompts, answers, prompts[1:], strict=False):
        assert after[: len(before) + len(answer)] == before + answer
    assert await gateway.metric("longhaul_divergences_total") == 0
    return prompts, answers


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


async def run(agent: Any, gateway: Gateway, directory: Path, words: str, *, again: bool | None) -> str:
    """Run the agent once. `again`: go on with the last session; None: with nothing but the words."""
    (binary, *arguments), environment = agent(gateway.url, directory, again)
    if again is None:
        arguments = []
    path = BINARIES / binary
    assert path.exists(), f"{binary} is not installed: run `make conformance`"
    return await execute([str(path), *arguments, words], directory, environment)


async def execute(command: list[str], directory: Path, environment: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(directory), "NO_PROXY": "*", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, (output[-2000:], errors[-2000:])
    return output.decode()


async def sampled(gateway: Gateway, prompts: list[list[int]]) -> list[list[int]]:
    """What the stand-in sampled for each prompt."""
    return [
        [
            id
            async for item in gateway.engine.script({"input_ids": prompt})
            if not isinstance(item, bytes)
            for id in item["output_ids"]
        ]
        for prompt in prompts
    ]
