"""Whether every turn of real agent clients continues from exactly the tokens of the last one.

Each recorded client (`bench.recorded_clients`) plays against the real service: a gateway, its ledger, and the
engine with the small K3 on a CPU. A tap between gateway and engine keeps the tokens of both directions. So
that a small model's answers are worth sending back, each turn forces a call: tools keep their names, but take
bounded arguments; and so that their prompts fit into its context, and are read in minutes, long texts (which
the recordings have as filler) are cut.

With --stub a stub engine is in the engine's place, and samples scripted K3 messages that no small model
writes: reasoning with odd spaces, text, one call or two, numbers in odd spellings.

Then each conversation is sent once more with one visible value changed, with one more message before it, and
by another tenant: nothing may be restored.

Exit status 1 unless every prompt extended the tokens of the turn before it, everything that clients dropped
and rewrote came back, and nothing else did.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.engine_tap import EngineTap
from bench.engines import note, running_engine
from bench.local_servers import local_gateway, running
from bench.recorded_clients import CHAT, MESSAGES, Habits, Json, Session, called_tool, load
from bench.session_player import STRANGER, Player, Report
from bench.stub_engine import StubEngine, sampled_ids, serving
from cache_store.servers import RedisServer, Role
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json

STUB_TURNS: Final = 6
ENGINE_TURNS: Final = 4
LONGEST_TEXT: Final = 200
"""Characters of a text that the real engine reads."""
SESSIONS_AT_ONCE: Final = 8
TURN_TOKENS: Final = 256
ARGUMENTS: Final[Json] = {
    "type": "object",
    "properties": {
        "mark": {"type": "string", "enum": [f"MARK {number}" for number in range(10)]},
        "text": {"type": "string", "maxLength": 16},
        "deep": {
            "type": "object",
            "properties": {
                "sure": {"type": ["boolean", "null"]},
                "numbers": {"type": "array", "items": {"enum": [1, 2.5, -0.125, 100]}, "maxItems": 2},
            },
            "required": ["sure", "numbers"],
            "additionalProperties": False,
        },
    },
    "required": ["mark", "text", "deep"],
    "additionalProperties": False,
}


class Forced:
    """Has a real model call one of the tools, within bounds."""

    def ask(self, session: Session, habits: Habits | None, turn: int, salt: str, body: Json) -> Json:
        """The body with bounded tools, of which one has to be called."""
        del habits, turn, salt
        limits = {CHAT: "max_completion_tokens", MESSAGES: "max_tokens"}
        body = {name: value for name, value in body.items() if not name.startswith("max_")}
        body[limits.get(session.path, "max_output_tokens")] = TURN_TOKENS
        if not body.get("tools"):
            return body
        body["tools"] = [_bounded(tool) for tool in body["tools"]]
        if session.path == MESSAGES:
            return {**body, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        return {**body, "tool_choice": "required", "parallel_tool_calls": False}


def _bounded(tool: Json) -> Json:
    if tools := tool.get("tools"):
        return {**tool, "tools": [_bounded(inner) for inner in tools]}
    if function := tool.get("function"):
        return {**tool, "function": {**function, "parameters": ARGUMENTS}}
    for name in ("parameters", "input_schema"):
        if name in tool:
            return {**tool, name: ARGUMENTS}
    return tool


class Scripted:
    """Has a stub engine sample scripted messages."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._said: dict[str, list[int]] = {}

    def ask(self, session: Session, habits: Habits | None, turn: int, salt: str, body: Json) -> Json:
        """The body as it is; the next request of this salt is answered with the turn's message."""
        self._said[salt] = sampled_ids(self._tokenizer, _message(session, habits, turn))
        return body

    def script(self, body: Mapping[str, Any]) -> Sequence[int]:
        """What the stub samples."""
        said = self._said.get(body["cache_salt"])
        return sampled_ids(self._tokenizer, {"content": "Who are you?"}) if said is None else said


def _message(session: Session, habits: Habits | None, turn: int) -> Json:
    """What the model says in a turn."""
    message: Json = {
        "reasoning_content": f"Turn {turn} of {session.client}: I should call the tool.\n  keep  spaces\n",
        "content": "" if turn % 2 else f"Let me check. {turn} é\n",
    }
    if habits is None:
        return message
    name, arguments = called_tool(habits.run)
    calls: list[Json] = []
    for number in range(1 + turn % 2):
        values = {
            **arguments,
            "mark": f"MARK {turn}, {number}",
            "numbers": [1, 2.5, -0.125],
            "deep": {"z": None, "a": {"b": [True, 'quote " and \\ slash\n']}},
            "count": 1e2,
        }
        function = {"name": name, "arguments": json.dumps(values, ensure_ascii=False)}
        calls.append({"id": str(number), "type": "function", "function": function})
    return {**message, "tool_calls": calls}


def tenant_of(place: int) -> str:
    """The tenant, and its key, of the session at a place."""
    return f"client-{place}"


@contextmanager
def stub_stack(scratch: Path, sessions: int) -> Generator[Player]:
    """A gateway in front of a stub engine that samples what is scripted."""
    model = scratch / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(tokenizer_json())
    tokenizer = K3Tokenizer.load(model)
    scripted = Scripted(tokenizer)
    with (
        serving(StubEngine(tokenizer, scripted.script, chunk=7)) as engine_url,
        _stack(scratch, engine_url, model, sessions) as (url, tap),
    ):
        yield Player(url, tap, scripted)


@contextmanager
def engine_stack(scratch: Path, model: Path, sessions: int) -> Generator[Player]:
    """A gateway in front of the real engine."""
    note("engine: booting")
    with (
        running_engine(model, scratch / "engine.log") as engine,
        _stack(scratch, engine.url, model, sessions) as (url, tap),
    ):
        yield Player(url, tap, Forced())


@contextmanager
def _stack(scratch: Path, engine_url: str, model: Path, sessions: int) -> Generator[tuple[str, EngineTap]]:
    """A gateway, with a tenant for each session and a stranger, behind a tap and with a ledger of its own."""
    tenants = scratch / "tenants.toml"
    names = [*map(tenant_of, range(sessions)), STRANGER]
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    tenants.write_text("\n".join(f'[tenants.{name}]\nkeys = ["sha256:{digests[name]}"]' for name in names))
    tap = EngineTap(engine_url)
    with ExitStack() as held:
        ledger = held.enter_context(RedisServer(Role.LEDGER, scratch / "ledger"))
        tap_url = held.enter_context(serving(tap))
        gateway, url = local_gateway(tap_url, ledger.url, model, scratch, tenants=tenants)
        held.enter_context(running(gateway))
        yield url, tap


def measure(player: Player, sessions: Sequence[Session], turns: int) -> Json:
    """Play all sessions, some of them at once, and report."""

    def play(place: int) -> Report:
        report = player.play(sessions[place], turns, tenant_of(place))
        note(f"{report}")
        return report

    with ThreadPoolExecutor(SESSIONS_AT_ONCE) as pool:
        reports = list(pool.map(play, range(len(sessions))))
    compared = sum(report.compared for report in reports)
    return {
        "clients": len(reports),
        "turns": sum(report.turns for report in reports),
        "prefix_exact": sum(report.exact for report in reports) / compared if compared else 0.0,
        "head_changes": sum(report.head_changes for report in reports),
        "reasoning_dropped": sum(report.reasoning_dropped for report in reports),
        "reasoning_restored": sum(report.reasoning_restored for report in reports),
        "ids_rewritten": sum(report.ids_rewritten for report in reports),
        "ids_restored": sum(report.ids_restored for report in reports),
        "refused": sum(report.error is not None for report in reports),
        "attacks": sum(report.attacks for report in reports),
        "false_restores": sum(report.false_restores for report in reports),
        "longest_prompt_tokens": max((report.prompt_tokens for report in reports), default=0),
        "holds": all(report.holds for report in reports),
        "each": [asdict(report) for report in reports],
    }


def main() -> int:
    """Measure and report; 0 when every client's turns were exact."""
    parser = argparse.ArgumentParser(prog="python -m bench.exact_turns", description=__doc__)
    parser.add_argument(
        "--turns", type=int, help=f"turns of a session ({ENGINE_TURNS}; {STUB_TURNS} with --stub)"
    )
    parser.add_argument("--client", default="", help="only clients whose name holds this")
    parser.add_argument("--model", type=Path, help="checkpoint (default: the small K3)")
    parser.add_argument("--stub", action="store_true", help="a stub engine with scripted answers")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    turns: int = args.turns or (STUB_TURNS if args.stub else ENGINE_TURNS)
    if turns < 2:
        parser.error(f"--turns {turns}: give 2 or more")
    recorded = load(None if args.stub else LONGEST_TEXT)
    sessions = [session for session in recorded if args.client in session.client]
    with tempfile.TemporaryDirectory(prefix="longhaul-turns-") as folder:
        scratch = Path(folder)
        stack = (
            stub_stack(scratch, len(sessions))
            if args.stub
            else engine_stack(scratch, (args.model or _small_checkpoint()).absolute(), len(sessions))
        )
        with stack as player:
            report = measure(player, sessions, turns)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["holds"] and report["clients"] else 1


def _small_checkpoint() -> Path:
    from model import small

    return small.build(small.default_path())


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("client", "turns", "exact", "reasoning restored", "ids restored", "false restores")
    table = Table(*columns, title="recorded clients against the service")
    for one in report["each"]:
        cells = (
            one["client"],
            one["turns"],
            f"{one['exact']} of {one['compared']}",
            f"{one['reasoning_restored']} of {one['reasoning_dropped']}",
            f"{one['ids_restored']} of {one['ids_rewritten']}",
            f"{one['false_restores']} of {one['attacks']}",
        )
        table.add_row(*map(str, cells))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
