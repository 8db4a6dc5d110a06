"""Plays tasks with a served model: requests by the openai package, calls on the scripted environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from model.tasks.environment import Environment
from model.tasks.task import Fact, Played, Task, play

if TYPE_CHECKING:
    from openai import OpenAI

MODEL: Final = "kimi-k3"
_MOST_REQUESTS: Final = 8
_MOST_TOKENS: Final = 700
_CODE: Final = re.compile(r"\b[A-Z]{2}-\d{3}-\d{3}\b")


@dataclass(slots=True)
class Judgement:
    """What became of a task. `holds_values`: does the answer contain all that it has to (None: nothing)."""

    kind: str
    is_right: bool
    holds_values: bool | None
    answer: str
    reasoning: str


@dataclass(slots=True)
class Counts:
    """Calls made, and those that named a tool and fitted its schema; tokens written."""

    calls: int = 0
    valid_calls: int = 0
    requests: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Conversation:
    """A conversation with a served model, as a client keeps it that drops the reasoning."""

    client: OpenAI
    environment: Environment
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counts: Counts = field(default_factory=Counts)

    def request(self, client: OpenAI | None = None, extra: Sequence[dict[str, Any]] = ()) -> Any:
        """One greedy answer to the conversation and `extra` messages; nothing is kept."""
        schema: Any = self.environment.schema()
        options: dict[str, Any] = {"tools": schema} if schema else {}
        create: Any = (client or self.client).chat.completions.create
        answer = create(
            model=MODEL,
            messages=[*self.messages, *extra],
            temperature=0,
            max_tokens=_MOST_TOKENS,
            **options,
        )
        self.counts.requests += 1
        self.counts.output_tokens += answer.usage.completion_tokens if answer.usage else 0
        return answer.choices[0].message

    def play(self, task: Task) -> Judgement:
        """Ask, execute the calls until the model answers without one, and judge."""
        expected_world = self.environment.fork()
        expected = play(task, expected_world)
        self.messages.append({"role": "user", "content": task.prompt})
        reasoning: list[str] = []
        answer = ""
        for _ in range(_MOST_REQUESTS):
            message = self.request()
            reasoning.append(getattr(message, "reasoning_content", None) or "")
            answer = message.content or ""
            kept: dict[str, Any] = {"role": "assistant", "content": answer}
            calls = message.tool_calls or []
            if calls:
                kept["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for call in calls
                ]
            self.messages.append(kept)
            if not calls:
                break
            for call in calls:
                outcome = self.environment.call(call.function.name, call.function.arguments)
                self.counts.calls += 1
                self.counts.valid_calls += outcome.is_valid
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": outcome.text})
        same_world = self.environment.state() == expected_world.state()
        return _judge(task, expected, answer, "\n".join(reasoning), same_world)


def _judge(task: Task, expected: Played, answer: str, reasoning: str, same_world: bool) -> Judgement:
    holds = all(value in answer for value in expected.values) if expected.values else None
    is_right = same_world and holds is not False
    if task.kind == "secret":
        is_right = is_right and chosen(reasoning) is not None
    return Judgement(task.kind, is_right, holds, answer, reasoning)


def chosen(reasoning: str) -> str | None:
    """The code that the model chose in its reasoning."""
    return match[0] if (match := _CODE.search(reasoning)) else None


def fact_of(task: Task, judgement: Judgement) -> Fact | None:
    """What can be asked for after the task; a secret's value is the one that the model chose."""
    fact = task.fact
    if fact is None or not fact.is_secret:
        return fact
    code = chosen(judgement.reasoning)
    return None if code is None else replace(fact, value=code, answer="", reasoning="")


@dataclass(slots=True)
class Tally:
    """Judgements by kind of task."""

    right: Counter[str] = field(default_factory=Counter[str])
    played: Counter[str] = field(default_factory=Counter[str])
    copies: int = 0
    exact_copies: int = 0

    def add(self, judgement: Judgement) -> None:
        """Count one."""
        self.played[judgement.kind] += 1
        self.right[judgement.kind] += judgement.is_right
        if judgement.holds_values is not None:
            self.copies += 1
            self.exact_copies += judgement.holds_values

    def by_kind(self) -> dict[str, float]:
        """Share of right tasks by kind."""
        return {kind: round(self.right[kind] / count, 3) for kind, count in sorted(self.played.items())}
