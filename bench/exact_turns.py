"""Whether every turn of real agent clients continues from exactly the tokens of the last one.

Each recorded client (`bench.recorded_clients`) plays against a real gateway and ledger. What the recorded
server answered is replaced by what ours answers, altered as that client altered its own: reasoning dropped,
ids rewritten, arguments spelled anew, parts for strings. After its recorded turns a client goes on in the
same manner. What the engine would see comes from a stub engine, which keeps every prompt and samples
scripted K3 messages: reasoning with odd spaces, text, one call or two with values of every type.

Then each conversation is sent once more with one visible value changed, with one more message before it, and
by another tenant: nothing may be restored.

Exit status 1 unless every prompt extended the tokens of the turn before it, everything that clients dropped
and rewrote came back, and nothing else did.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.engines import note
from bench.local_servers import local_gateway, running
from bench.recorded_clients import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Habits,
    Json,
    Session,
    called_tool,
    is_answer,
    learned,
    load,
    runs,
)
from bench.recorded_clients import call_ids as call_ids_of
from bench.stub_engine import StubEngine, sampled_ids, serving
from cache_store.servers import RedisServer, Role
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json

TURNS: Final = 6
_KEYS: Final = ("one", "two")
_RECORDER_LEFT_OUT: Final = ("reasoning_effort", "prompt_cache_key", "session_id")
"""What some recording scripts, not the clients, set in their first request alone."""
_RESTORED: Final = re.compile(r"reasoning=(\d+), ids=(\d+)")


@dataclass(slots=True)
class Report:
    """One client's session. `compared`: turns that have a turn before them under the same head."""

    client: str
    path: str
    turns: int = 0
    compared: int = 0
    exact: int = 0
    head_changes: int = 0
    reasoning_dropped: int = 0
    reasoning_restored: int = 0
    ids_rewritten: int = 0
    ids_restored: int = 0
    false_restores: int = 0
    attacks: int = 0

    @property
    def holds(self) -> bool:
        """Whether all is as it must be."""
        return (
            self.exact == self.compared
            and self.reasoning_restored == self.reasoning_dropped
            and self.ids_restored == self.ids_rewritten
            and not self.false_restores
        )


class Player:
    """Plays sessions against one gateway in front of one stub engine."""

    def __init__(self, url: str, engine: StubEngine, tokenizer: K3Tokenizer) -> None:
        self._url = url
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampled: list[int] = []
        engine.prompts = []
        engine.script = self._script

    def _script(self, _: Mapping[str, Any]) -> Sequence[int]:
        return self._sampled

    def play(self, session: Session, turns: int) -> Report:
        """One session of so many turns, as far as the recording shows how it would go on."""
        report = Report(session.client, session.path)
        habits = learned(session)
        answers: list[tuple[list[Json], list[Json]]] = []  # by turn: as sent back, and the results
        seen: list[list[int]] = []
        held: list[int] = []  # the turns whose answers stand in the conversation
        body: Json = {}
        tools: list[Any] = []
        headers: Mapping[str, str] = {}
        answer: Any = None
        for turn in range(turns if habits else len(session.turns)):
            if turn < len(session.turns):
                body = {**_kept(session.turns[0]), **session.turns[turn]}
                cut = runs(body[session.key])
                if sum(is_answer(run[0]) for run in cut) > len(held):
                    held.append(turn - 1)
                body[session.key] = _replaced(cut, [answers[place] for place in held])
            else:
                altered, results = answers[-1]
                held.append(turn - 1)
                body = {**body, session.key: [*body[session.key], *altered, *results]}
            message = _message(session, habits, turn)
            self._sampled = sampled_ids(self._tokenizer, message)
            headers, answer = self._ask(session, body)
            assert self._engine.prompts is not None
            prompt = list(self._engine.prompts[-1])
            report.turns += 1
            tools.append(body.get("tools"))
            if held:
                same_head = tools[-1] == tools[held[-1]]
                report.head_changes += not same_head
                report.compared += same_head
                before = seen[held[-1]]
                report.exact += same_head and prompt[: len(before)] == before
            seen.append([*prompt, *self._sampled])
            if habits is not None:
                answers.append((habits.altered(answer), habits.answered(answer)))
                if turn == turns - 1:
                    break
        if habits is not None:
            restored = _RESTORED.fullmatch(headers["x-longhaul-restored"])
            assert restored is not None
            report.reasoning_restored, report.ids_restored = int(restored[1]), int(restored[2])
            provable = [place for place in held if all(later == tools[place] for later in tools[place:])]
            report.reasoning_dropped = len(provable) if habits.drops_reasoning else 0
            report.ids_rewritten = len(habits.renamed) - len(call_ids_of(answer)) if habits.renamed else 0
            self._attack(session, body, seen, report)
        return report

    def _attack(self, session: Session, body: Json, seen: Sequence[list[int]], report: Report) -> None:
        """Ask for what nothing proves: nothing of the recorded turns may be in the prompt."""
        changed = json.loads(json.dumps(body[session.key]).replace("MARK 0", "MARK X"))
        before = [{"role": "user", "content": "Something else first."}, *body[session.key]]
        for conversation, key in ((changed, "one"), (before, "one"), (body[session.key], "two")):
            report.attacks += 1
            assert self._engine.prompts is not None
            asked = len(self._engine.prompts)
            answer = self._post(session, {**body, session.key: conversation, "stream": False}, key)
            if answer.status_code == 400 and key == "two":  # items of another tenant can't be referred to
                continue
            answer.raise_for_status()
            prompt = list(self._engine.prompts[asked])
            restored = answer.headers["x-longhaul-restored"] != "reasoning=0, ids=0"
            continued = "x-longhaul-parent" in answer.headers
            same = key == "one" and any(prompt[: len(tokens)] == tokens for tokens in seen)
            report.false_restores += restored or continued or same

    def _post(self, session: Session, body: Json, key: str = "one") -> httpx.Response:
        headers = {**session.headers, "x-api-key": key, "anthropic-version": "2023-06-01"}
        body = {**body, "model": "kimi-k3"}
        return httpx.post(f"{self._url}{session.path}", json=body, headers=headers, timeout=60)

    def _ask(self, session: Session, body: Json) -> tuple[Mapping[str, str], Any]:
        """Headers and answer: a message, or the items of a response."""
        response = self._post(session, body)
        if not response.is_success:
            raise RuntimeError(f"{session.client}: {response.status_code}: {response.text[:500]}")
        if not body.get("stream"):
            whole = response.json()
        else:
            lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
            events: list[Json] = [json.loads(line.removeprefix("data: ")) for line in lines]
            joined = {CHAT: _chat_joined, RESPONSES: _response_joined, MESSAGES: _message_joined}
            whole = joined[session.path](events)
        match session.path:
            case "/v1/chat/completions":
                return response.headers, whole["choices"][0]["message"]
            case "/v1/responses":
                return response.headers, whole["output"]
            case _:
                return response.headers, whole


def _kept(first: Json) -> Json:
    return {name: first[name] for name in _RECORDER_LEFT_OUT if name in first}


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


def _replaced(cut: Sequence[list[Json]], answers: Sequence[tuple[list[Json], list[Json]]]) -> list[Json]:
    """A recorded conversation with our answers and their results for the recorded ones."""
    entries: list[Json] = []
    told = iter(answers)
    results: list[Json] | None = None
    for run in cut:
        if is_answer(run[0]):
            altered, results = next(told)
            entries += altered
        elif results is None:
            entries += run
        else:
            entries += [*results, *(entry for entry in run if not _is_result(entry))]
            results = None
    return entries


def _is_result(entry: Json) -> bool:
    content = entry.get("content")
    blocks = content if isinstance(content, list) else ()
    return (
        entry.get("role") == "tool"
        or entry.get("type") == "function_call_output"
        or any(block.get("type") == "tool_result" for block in blocks)
    )


def _chat_joined(chunks: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({**call, "function": {**call["function"]}})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message}]}


def _response_joined(events: Sequence[Json]) -> Json:
    return events[-1]["response"]


def _message_joined(events: Sequence[Json]) -> Json:
    blocks: list[Json] = []
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] = (block.get(name) or "") + delta[name]
            case _:
                pass
    for place, text in inputs.items():
        blocks[place]["input"] = json.loads(text or "{}")
    return {"role": "assistant", "content": blocks}


@contextmanager
def stack(scratch: Path) -> Generator[Player]:
    """A gateway with two tenants, a ledger and a stub engine."""
    model = scratch / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(tokenizer_json())
    tenants = scratch / "tenants.toml"
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in _KEYS}
    tenants.write_text("\n".join(f'[tenants.{key}]\nkeys = ["sha256:{digests[key]}"]' for key in _KEYS))
    tokenizer = K3Tokenizer.load(model)
    engine = StubEngine(tokenizer, lambda _: [], chunk=7)
    with RedisServer(Role.LEDGER, scratch / "ledger") as ledger, serving(engine) as engine_url:
        gateway, url = local_gateway(engine_url, ledger.url, model, scratch, tenants=tenants)
        with running(gateway):
            yield Player(url, engine, tokenizer)


def measure(scratch: Path, turns: int = TURNS, sessions: Sequence[Session] | None = None) -> Json:
    """Play all sessions and report."""
    reports: list[Report] = []
    with stack(scratch) as player:
        for session in load() if sessions is None else sessions:
            reports.append(player.play(session, turns))
            note(f"{reports[-1]}")
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
        "attacks": sum(report.attacks for report in reports),
        "false_restores": sum(report.false_restores for report in reports),
        "holds": all(report.holds for report in reports),
        "each": [asdict(report) for report in reports],
    }


def main() -> int:
    """Measure and report; 0 when every client's turns were exact."""
    parser = argparse.ArgumentParser(prog="python -m bench.exact_turns", description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of a session (%(default)s)")
    parser.add_argument("--client", default="", help="only clients whose name holds this")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    if args.turns < 2:
        parser.error(f"--turns {args.turns}: give 2 or more")
    sessions = [session for session in load() if args.client in session.client]
    with tempfile.TemporaryDirectory(prefix="longhaul-turns-") as folder:
        report = measure(Path(folder), args.turns, sessions)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0 if report["holds"] and report["clients"] else 1


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
