"""Recorded requests of real clients, and how each of them sends back what it was answered.

`recorded_clients.jsonl` has one session a line: client, case, path, headers, and its requests' bodies. A text
of more than 60 characters is `{"$text": LENGTH}`, and stands for filler of that length; `"tools": "="` are
those of the request before. The recordings come from another server, whose answers were the same each time:
reasoning "THINK-ONE: ...", perhaps "Let me check.", and one call `functions.NAME:0` (Chat Completions). What
a client made of them is what it makes of ours: which fields it kept, in which form, its spelling of arguments
and ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

RECORDINGS: Final = Path(__file__).with_suffix(".jsonl")
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"

_FILLER: Final = "the tool reads a file and returns its text, so that the agent can plan its next step. "
_OURS_TO_THEIRS: Final = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class Session:
    """One client's recorded session. `rewrites`: it makes ids of its own, and re-orders arguments."""

    client: str
    path: str
    headers: Mapping[str, str]
    turns: tuple[Json, ...]
    rewrites: bool = False

    @property
    def key(self) -> str:
        """The field that holds the conversation."""
        return "input" if self.path == RESPONSES else "messages"


def load(longest_text: int | None = None) -> list[Session]:
    """All recorded sessions, and one for each API whose client rewrites all that it can.

    Texts that filler stands for are cut to `longest_text` characters.
    """
    sessions: list[Session] = []
    for line in RECORDINGS.read_text(encoding="utf-8").splitlines():
        recorded = json.loads(line)
        turns: list[Json] = []
        for body in recorded["turns"]:
            if body.get("tools") == "=":
                body["tools"] = turns[-1]["tools"]
            turns.append(_filled(body, longest_text))
        name = f"{recorded['client']} {recorded['case'] or ''}".strip()
        sessions.append(Session(name, recorded["path"], recorded["headers"], tuple(turns)))
    for path in (CHAT, RESPONSES, MESSAGES):
        model = next(session for session in sessions if session.path == path and len(session.turns) > 1)
        sessions.append(Session(f"rewriter {path}", path, {}, model.turns, rewrites=True))
    return sessions


def _filled(value: Any, longest_text: int | None) -> Any:
    match value:
        case {"$text": int(length)}:
            length = length if longest_text is None else min(length, longest_text)
            return (_FILLER * (length // len(_FILLER) + 1))[:length]
        case dict():
            fields: Json = value  # pyright: ignore[reportUnknownVariableType] # JSON
            return {name: _filled(part, longest_text) for name, part in fields.items()}
        case list():
            parts: list[Any] = value  # pyright: ignore[reportUnknownVariableType] # JSON
            return [_filled(part, longest_text) for part in parts]
        case _:
            return value


def is_answer(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of a conversation is the model's, or part of it."""
    return entry.get("role") == "assistant" or entry.get("type") in (
        "reasoning",
        "function_call",
        "item_reference",
    )


def runs(entries: Sequence[Json]) -> list[list[Json]]:
    """A conversation, cut where an answer begins or ends."""
    cut: list[list[Json]] = []
    for entry in entries:
        if cut and is_answer(cut[-1][-1]) == is_answer(entry):
            cut[-1].append(entry)
        else:
            cut.append([entry])
    return cut


@dataclass(slots=True)
class Habits:
    """How a client sends answers back, learned from a recorded one (`run`) and what it answered to it."""

    session: Session
    run: list[Json]
    results: list[Json]
    renamed: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def drops_reasoning(self) -> bool:
        """Whether a client's messages come back without their reasoning."""
        if self.session.rewrites:
            return True
        match self.session.path:
            case "/v1/chat/completions":
                return "reasoning_content" not in self.run[0]
            case "/v1/messages":
                return all(block["type"] != "thinking" for block in self.run[0]["content"])
            case _:
                return all(item["type"] not in ("reasoning", "item_reference") for item in self.run)

    def altered(self, answer: Any) -> list[Json]:
        """Our answer (a message, or the items of a response) as this client sends it back."""
        match self.session.path:
            case "/v1/chat/completions":
                return [self._chat(answer)]
            case "/v1/messages":
                return [self._message(answer)]
            case _:
                return [self._item(item) for item in answer if self._kept(item)]

    def answered(self, answer: Any) -> list[Json]:
        """The results of all calls in our answer, worded as this client's."""
        ids = [self._id(id) for id in call_ids(answer)]
        if self.session.path == MESSAGES:
            result = self.results[0]["content"][0]
            blocks = [{**result, "tool_use_id": id} for id in ids]
            return [{**self.results[0], "content": blocks}]
        name = "call_id" if self.session.path == RESPONSES else "tool_call_id"
        template = {key: value for key, value in self.results[0].items() if key != "id"}
        return [{**template, name: id} for id in ids]

    def _chat(self, answer: Json) -> Json:
        template, message = self.run[0], Json()
        for name, recorded in template.items():
            match name:
                case "content" if isinstance(recorded, list):
                    message[name] = [{"type": "text", "text": answer["content"] or ""}]
                case "tool_calls":
                    calls = answer.get("tool_calls") or []
                    if calls:
                        message[name] = [self._call(recorded[0], call) for call in calls]
                case "reasoning_content" if self.session.rewrites or not answer.get("reasoning_content"):
                    pass  # what the recorded model thought is no thought of ours
                case _:
                    message[name] = answer.get(name, recorded)
        return message

    def _call(self, template: Json, call: Json) -> Json:
        function = {
            "name": call["function"]["name"],
            "arguments": self._arguments(call["function"]["arguments"], template["function"]["arguments"]),
        }
        made = {"id": self._id(call["id"]), "type": "function", "function": function}
        return {name: made[name] for name in template}

    def _message(self, answer: Json) -> Json:
        templates = {block["type"]: block for block in self.run[0]["content"]}
        blocks: list[Json] = []
        for block in answer["content"]:
            template = templates.get(block["type"])
            if template is None or (block["type"] == "thinking" and self.session.rewrites):
                continue
            kept = {name: block.get(name, recorded) for name, recorded in template.items()}
            if block["type"] == "tool_use":
                kept["id"] = self._id(block["id"])
                if self.session.rewrites:
                    kept["input"] = dict(reversed(block["input"].items()))
            blocks.append(kept)
        return {"role": "assistant", "content": blocks}

    def _kept(self, item: Json) -> bool:
        if item["type"] == "reasoning":
            return not self.drops_reasoning
        return True

    def _item(self, item: Json) -> Json:
        templates = {entry["type"]: entry for entry in self.run}
        refers = "item_reference" in templates
        if refers and item["type"] in ("reasoning", "message"):
            return {"type": "item_reference", "id": item["id"]}
        template = templates.get(item["type"])
        if template is None:  # there was none in the recorded answer
            return item
        kept = {name: item.get(name) for name, recorded in template.items() if name in item or not recorded}
        if item["type"] == "function_call":
            kept["call_id"] = self._id(item["call_id"])
            kept["arguments"] = self._arguments(item["arguments"], template["arguments"])
        if self.session.rewrites:
            kept.pop("id", None)
        return kept

    def _arguments(self, ours: str, recorded: str) -> str:
        """Spelled as the client spelled the recorded ones; left alone where it left them alone."""
        value = json.loads(ours)
        if self.session.rewrites:
            return json.dumps(dict(reversed(value.items())), separators=(" , ", " : "))
        if recorded == json.dumps(json.loads(recorded), separators=(",", ":")):
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return ours

    def _id(self, id: str) -> str:
        if self.session.rewrites:
            return self.renamed.setdefault(id, f"functions.tool:{len(self.renamed)}")
        return _OURS_TO_THEIRS.sub("_", id)  # Kimi Code; nobody else's ids change by it


def call_ids(answer: Any) -> list[str]:
    """The ids of the calls in an answer of ours, over any of the APIs."""
    if isinstance(answer, list):
        items: list[Json] = answer  # pyright: ignore[reportUnknownVariableType] # JSON
        return [item["call_id"] for item in items if item["type"] == "function_call"]
    if isinstance(answer.get("content"), list):
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    return [call["id"] for call in answer.get("tool_calls") or ()]


def learned(session: Session) -> Habits | None:
    """The habits that a session shows; None when no answer came back in it."""
    for body in session.turns[1:]:
        cut = runs(body[session.key])
        for run, results in pairwise(cut):
            if is_answer(run[0]) and _has_call(run):
                return Habits(session, run, results)
    return None


def _has_call(run: Sequence[Json]) -> bool:
    text = json.dumps(run)
    return any(mark in text for mark in ('"tool_calls"', '"function_call"', '"tool_use"'))


def called_tool(run: Sequence[Json]) -> tuple[str, Json]:
    """Name and arguments of the recorded call."""
    for entry in run:
        for call in entry.get("tool_calls") or ():
            return call["function"]["name"], json.loads(call["function"]["arguments"])
        if entry.get("type") == "function_call":
            return entry["name"], json.loads(entry["arguments"])
        content = entry.get("content")
        for block in content if isinstance(content, list) else ():
            if block.get("type") == "tool_use":
                return block["name"], block["input"]
    raise AssertionError("a run that was learned from has a call")
