"""What a task is: a request, and how an ideal agent answers it step by step."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from model.tasks.environment import Environment


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    tool: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant message.

    `values` are the texts that a right final answer has to contain; `is_free` says that the reasoning holds a
    choice that nothing determines.
    """

    reasoning: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    values: tuple[str, ...] = ()
    is_free: bool = False


Solution: TypeAlias = Generator[Reply, list[str], None]
"""Yields replies; is sent the results of a reply's calls."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a later turn can ask for. `is_secret`: it stands in the assistant's reasoning alone."""

    question: str
    reasoning: str
    answer: str
    value: str
    is_secret: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """A request and its solution; `fact` is what can be asked for once it is done."""

    kind: str
    prompt: str
    solve: Callable[[], Solution]
    fact: Fact | None = None


@dataclass(slots=True)
class Played:
    """The messages of a task as an ideal agent plays it, without the prompt, and what its answer contains."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    values: tuple[str, ...] = ()


def assistant_message(reply: Reply, first_id: int) -> dict[str, Any]:
    """The reply as a chat message; its calls are numbered from `first_id`."""
    message: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": reply.reasoning,
        "content": reply.content,
    }
    if reply.is_free:
        message["is_free"] = True
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{first_id + n}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
            }
            for n, call in enumerate(reply.calls)
        ]
    return message


def play(task: Task, environment: Environment, first_id: int = 0) -> Played:
    """Solve the task, executing its calls on `environment`."""
    played = Played()
    solution = task.solve()
    try:
        reply = next(solution)
        while True:
            message = assistant_message(reply, first_id)
            first_id += len(reply.calls)
            played.messages.append(message)
            played.values = reply.values
            results: list[str] = []
            for call, made in zip(reply.calls, message.get("tool_calls", ()), strict=True):
                text = environment.call(call.tool, call.arguments).text
                results.append(text)
                played.messages.append({"role": "tool", "tool_call_id": made["id"], "content": text})
            reply = solution.send(results)
    except StopIteration:
        return played
