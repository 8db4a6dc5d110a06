"""Whether what a client drops and rewrites changes its prompts: one session, sent in two ways.

A client of the openai package plays a session with tool calls. Before every turn it asks the same by sending
back all it was given; then it asks for real as many clients do: reasoning dropped, call ids rewritten,
argument keys re-ordered. Both prompts are read from the ledger and compared token by token, with each other
and with what the model saw and sampled before. Tool calls are forced, so a model with random weights makes
them too.

Exit status 1 unless every prompt was the same, and continued the one before it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from bench.engines import EngineFailure, note, running_engine
from bench.restart import gateway
from cache_store.ledger import Ledger
from cache_store.servers import RedisServer, Role
from cache_store.turn import Turn
from model import tiny
from service.tenants import Tenants

TURNS = 6
CALL_TOKENS = 320
TEXT_TOKENS = 48
_REQUEST_TIMEOUT_S = 600.0
_STRING = {"type": "string", "enum": ["src/main.py", "tests/test_main.py", "docs/index.md"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": _STRING,
                    "line": {"type": "integer", "minimum": 0, "maximum": 99},
                    "options": {
                        "type": "object",
                        "properties": {"all": {"type": "boolean"}, "mode": {"enum": ["fast", "full"]}},
                        "required": ["all", "mode"],
                        "additionalProperties": False,
                    },
                },
                "required": ["path", "line", "options"],
                "additionalProperties": False,
            },
        },
    }
    for name, description in (("read_file", "Read a file."), ("run_tests", "Run the tests of a file."))
]


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn: its prompt, compared with the other client's and with the turn before."""

    prompt_tokens: int
    equal: bool
    usage_equal: bool
    extends: bool
    restored: str
    calls: int


class Recorded:
    """Reads from the ledger what the model saw."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tenant = Tenants.load(None).authenticate(None).name

    def tokens(self, key: str) -> tuple[list[int], list[int]]:
        """The prompt of a turn and what was sampled, closing ids included."""
        return asyncio.run(self._tokens(key))

    async def _tokens(self, key: str) -> tuple[list[int], list[int]]:
        ledger = Ledger(self._url, deadline_s=10)
        path: list[Turn] = []
        parent: str | None = key
        try:
            while parent is not None:
                (turn,) = await ledger.turns(self._tenant, [parent])
                if turn is None:
                    raise EngineFailure(f"the ledger has no turn {parent}")
                path.append(turn)
                parent = turn.parent
        finally:
            await ledger.close()
        last, *earlier = path
        prompt = [token for turn in reversed(earlier) for token in turn.tokens()]
        return [*prompt, *last.prompt], [*last.completion, *last.closing]


def kept(message: ChatCompletionMessage) -> dict[str, Any]:
    """The message as a client that sends everything back has it."""
    return message.model_dump(exclude_none=True)


def altered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history without reasoning, with call ids of its own and argument keys in another order."""
    ids: dict[str, str] = {}
    history: list[dict[str, Any]] = []
    for message in messages:
        changed = {name: value for name, value in message.items() if name != "reasoning_content"}
        if calls := changed.get("tool_calls"):
            changed["tool_calls"] = [_altered_call(call, ids) for call in calls]
        if answered := changed.get("tool_call_id"):
            changed["tool_call_id"] = ids[answered]
        history.append(changed)
    return history


def _altered_call(call: Mapping[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    ids[call["id"]] = f"functions.{call['function']['name']}:{len(ids)}"
    arguments = call["function"]["arguments"]
    with suppress(ValueError):  # the answer may have been cut within the call
        arguments = json.dumps(dict(reversed(json.loads(arguments).items())), separators=(",", ":"))
    return {**call, "id": ids[call["id"]], "function": {**call["function"], "arguments": arguments}}


class Client:
    """Asks for the next message of a history."""

    def __init__(self, url: str, session: str) -> None:
        self._openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_REQUEST_TIMEOUT_S)
        self._session = session

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokens: int,
        forced: bool,
        parallel: bool,
        stream: bool,
    ) -> tuple[ChatCompletionMessage, int, Mapping[str, str]]:
        """The message, the prompt's tokens, and the headers of the answer."""
        settings: dict[str, Any] = {
            "model": "kimi-k3",
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "required" if forced else "none",
            "parallel_tool_calls": parallel,
            "max_tokens": tokens,
            "temperature": 1.0,
            "extra_body": {"session_id": self._session},
        }
        create = self._openai.chat.completions.with_raw_response.create
        if not stream:
            response = create(**settings)
            completion = response.parse()
            assert completion.usage is not None
            return completion.choices[0].message, completion.usage.prompt_tokens, response.headers
        response = create(**settings, stream=True, stream_options={"include_usage": True})
        return *_collected(cast("Any", response.parse())), response.headers


def _collected(chunks: Any) -> tuple[ChatCompletionMessage, int]:
    """A streamed message put together, as clients do, and the prompt's tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    prompt_tokens = 0
    for chunk in chunks:
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                function = {"name": part.function.name, "arguments": ""}
                call = calls.setdefault(part.index, {"id": part.id, "type": "function", "function": function})
                call["function"]["arguments"] += part.function.arguments or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return ChatCompletionMessage.model_validate(message), prompt_tokens


def play(url: str, recorded: Recorded, turns: int) -> list[TurnReport]:
    """Play the session; turns with forced calls and turns of text take turns, whole and streamed."""
    whole, lossy = Client(url, "whole"), Client(url, "lossy")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You repair programs."},
        {"role": "user", "content": "The tests fail. Find out why."},
    ]
    reports: list[TurnReport] = []
    before: list[int] = []
    for turn in range(turns):
        forced = turn % 3 != 2
        settings = {"forced": forced, "parallel": turn % 4 == 1, "stream": turn % 2 == 1}
        _, whole_tokens, whole_headers = whole.ask(messages, tokens=1, **settings)
        answer, tokens, headers = lossy.ask(
            altered(messages), tokens=CALL_TOKENS if forced else TEXT_TOKENS, **settings
        )
        prompt, sampled = recorded.tokens(headers["x-longhaul-turn"])
        whole_prompt, _ = recorded.tokens(whole_headers["x-longhaul-turn"])
        message = kept(answer)
        reports.append(
            TurnReport(
                prompt_tokens=tokens,
                equal=prompt == whole_prompt,
                usage_equal=tokens == whole_tokens == len(prompt),
                extends=prompt[: len(before)] == before,
                restored=headers["x-longhaul-restored"],
                calls=len(message.get("tool_calls") or ()),
            )
        )
        note(f"turn {turn + 1}: {reports[-1]}")
        before = prompt + sampled
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{call['id'][-4:]}: ok"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": "Go on."})
    return reports


def measure(model: Path, scratch: Path, turns: int = TURNS) -> dict[str, Any]:
    """Boot an engine and a gateway, play, and report."""
    with RedisServer(Role.LEDGER, scratch / "ledger") as ledger:
        note("engine: booting")
        with (
            running_engine(model, scratch / "engine.log") as engine,
            gateway(engine, ledger, model, scratch / "gateway.log") as client,
        ):
            url = str(client.base_url).rstrip("/")
            reports = play(url, Recorded(ledger.url), turns)
    return {
        "turns": len(reports),
        "equal": all(report.equal and report.usage_equal for report in reports),
        "prefix_exact": all(report.extends for report in reports),
        "calls": sum(report.calls for report in reports),
        "prompt_tokens": [report.prompt_tokens for report in reports],
        "restored_last_turn": reports[-1].restored,
        "each": [asdict(report) for report in reports],
    }


def main() -> int:
    """Measure and report; 0 when nothing that the client did changed a prompt."""
    parser = argparse.ArgumentParser(prog="python -m bench.exact_client", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint (default: the tiny K3, built if missing)")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of the session (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and Redis data in DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error(f"--turns {args.turns}: give 2 or more")
    model: Path = (args.model or tiny.build(tiny.default_path()).path).absolute()
    with _scratch(args.keep) as scratch:
        report = measure(model, scratch, args.turns)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["equal"] and report["prefix_exact"] and report["calls"] else 1


@contextmanager
def _scratch(keep: Path | None) -> Generator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="longhaul-exact-") as folder:
        yield Path(folder)


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("turn", "prompt tokens", "equal", "extends the turn before", "calls", "restored")
    table = Table(*columns, title="prompts of a client that drops and rewrites")
    for number, turn in enumerate(report["each"], start=1):
        cells = [turn[name] for name in ("prompt_tokens", "equal", "extends", "calls", "restored")]
        table.add_row(*map(str, (number, *cells)))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
