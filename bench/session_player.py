"""Plays recorded sessions against a gateway, and compares what its engine was asked with what it had sampled.

What the recorded server answered is replaced by what this one answers, altered as the client altered its own
(`bench.recorded_clients`). After its recorded turns a client goes on in the same manner. Each session is a
tenant of its own, so what belongs to it can be told at the engine by its cache salt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx

from bench.engine_tap import EngineTap, Generated
from bench.joined_streams import joined
from bench.recorded_clients import CHAT, RESPONSES, Habits, Json, Session, is_answer, learned, runs
from bench.recorded_clients import call_ids as call_ids_of
from service.tenants import Tenant

STRANGER: Final = "stranger"
"""The tenant, and its key, that asks for what belongs to others."""
_RECORDER_LEFT_OUT: Final = ("reasoning_effort", "prompt_cache_key", "session_id")
"""What some recording scripts, not the clients, set in their first request alone."""
_RESTORED: Final = re.compile(r"reasoning=(\d+), ids=(\d+)")
_MARK: Final = re.compile(r"MARK \d")
_TIMEOUT_S: Final = 600.0


class Speaker(Protocol):
    """Whoever makes the engine's answers worth altering."""

    def ask(self, session: Session, habits: Habits | None, turn: int, salt: str, body: Json) -> Json:
        """The body to send for a turn, so that it is answered with a call whose arguments show a `MARK`."""
        ...


@dataclass(slots=True)
class Report:
    """One client's session. `compared`: turns that have a turn before them under the same head.

    error: what a turn was refused with, where one was; the session ends there.
    """

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
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Whether all is as it must be."""
        return (
            self.exact == self.compared
            and self.reasoning_restored == self.reasoning_dropped
            and self.ids_restored == self.ids_rewritten
            and not self.false_restores
            and self.error is None
        )


class TurnRefused(RuntimeError):
    """A turn that was to be answered was not."""


class Player:
    """Plays sessions against one gateway, whose engine is tapped."""

    def __init__(self, url: str, tap: EngineTap, speaker: Speaker) -> None:
        self._url = url
        self._tap = tap
        self._speaker = speaker

    def play(self, session: Session, turns: int, tenant: str) -> Report:
        """One session of so many turns, as far as the recording shows how it would go on."""
        report = Report(session.client, session.path)
        try:
            self._play(session, turns, tenant, report)
        except TurnRefused as error:
            report.error = str(error)
        return report

    def _play(self, session: Session, turns: int, tenant: str, report: Report) -> None:
        habits = learned(session)
        salt = Tenant(tenant).cache_salt
        answers: list[tuple[list[Json], list[Json]]] = []  # by turn: as sent back, and the results
        reasoned: list[bool] = []
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
            body = self._speaker.ask(session, habits, turn, salt, body)
            headers, answer = self._ask(session, body, tenant)
            generated = self._generated(salt)[-1]
            report.turns += 1
            report.prompt_tokens = len(generated.prompt)
            tools.append(body.get("tools"))
            if held:
                same_head = tools[-1] == tools[held[-1]]
                report.head_changes += not same_head
                report.compared += same_head
                before = seen[held[-1]]
                report.exact += same_head and generated.prompt[: len(before)] == before
            seen.append([*generated.prompt, *generated.sampled])
            reasoned.append(_has_reasoning(session, answer))
            if habits is not None:
                answers.append((habits.altered(answer), habits.answered(answer)))
        if habits is not None:
            restored = _RESTORED.fullmatch(headers["x-longhaul-restored"])
            assert restored is not None
            report.reasoning_restored, report.ids_restored = int(restored[1]), int(restored[2])
            provable = [place for place in held if all(later == tools[place] for later in tools[place:])]
            dropped = [place for place in provable if reasoned[place]]
            report.reasoning_dropped = len(dropped) if habits.drops_reasoning else 0
            report.ids_rewritten = len(habits.renamed) - len(call_ids_of(answer)) if habits.renamed else 0
            self._attack(session, body, seen, report, tenant)

    def _attack(
        self, session: Session, body: Json, seen: Sequence[list[int]], report: Report, tenant: str
    ) -> None:
        """Ask for what nothing proves: nothing of the recorded turns may be in the prompt."""
        shown = body[session.key]
        changed = json.loads(_MARK.sub("MARK X", json.dumps(shown)))
        before = [{"role": "user", "content": "Something else first."}, *shown]
        for conversation, who in ((changed, tenant), (before, tenant), (shown, STRANGER)):
            report.attacks += 1
            asked = len(self._generated(Tenant(who).cache_salt))
            answer = self._post(session, {**body, session.key: conversation, "stream": False}, who)
            if answer.status_code == 400 and who == STRANGER:  # items of others can't be referred to
                continue
            answer.raise_for_status()
            prompts = [one.prompt for one in self._generated(Tenant(who).cache_salt)[asked:]]
            restored = answer.headers["x-longhaul-restored"] != "reasoning=0, ids=0"
            continued = "x-longhaul-parent" in answer.headers
            same = who == tenant and any(
                prompt[: len(tokens)] == tokens for tokens in seen for prompt in prompts
            )
            report.false_restores += restored or continued or same

    def _generated(self, salt: str) -> list[Generated]:
        return self._tap.generated.get(salt, [])

    def _post(self, session: Session, body: Json, tenant: str) -> httpx.Response:
        headers = {**session.headers, "x-api-key": tenant, "anthropic-version": "2023-06-01"}
        body = {**body, "model": "kimi-k3"}
        return httpx.post(f"{self._url}{session.path}", json=body, headers=headers, timeout=_TIMEOUT_S)

    def _ask(self, session: Session, body: Json, tenant: str) -> tuple[Mapping[str, str], Any]:
        """Headers and answer: a message, or the items of a response."""
        response = self._post(session, body, tenant)
        if not response.is_success:
            raise TurnRefused(f"{session.client}: {response.status_code}: {response.text[:500]}")
        whole = joined(session.path, response.text) if body.get("stream") else response.json()
        match session.path:
            case "/v1/chat/completions":
                return response.headers, whole["choices"][0]["message"]
            case "/v1/responses":
                return response.headers, whole["output"]
            case _:
                return response.headers, whole


def _has_reasoning(session: Session, answer: Any) -> bool:
    if session.path == CHAT:
        return bool(answer.get("reasoning_content"))
    parts: list[Json] = answer if session.path == RESPONSES else answer["content"]
    return any(part["type"] in ("reasoning", "thinking") for part in parts)


def _kept(first: Json) -> Json:
    return {name: first[name] for name in _RECORDER_LEFT_OUT if name in first}


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
