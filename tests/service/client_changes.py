"""What clients do to a conversation before they send it back, without changing what it shows."""

import copy
import json
import random
from typing import Any

Messages = list[dict[str, Any]]


def drop_reasoning(messages: Messages, chance: random.Random) -> None:
    """LangChain, openai-agents, the AI SDK and others never send reasoning back."""
    for message in messages:
        if chance.random() < 0.8:
            message.pop("reasoning_content", None)


def respace_reasoning(messages: Messages, chance: random.Random) -> None:
    """White space in reasoning is trimmed or wrapped."""
    for message in messages:
        if reasoning := message.get("reasoning_content"):
            message["reasoning_content"] = chance.choice(
                (reasoning.strip(), f"{reasoning}\n", f" {reasoning}")
            )


def rewrite_ids(messages: Messages, chance: random.Random) -> None:
    """Kimi Code and smolagents make ids of their own."""
    renamed: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            renamed[call["id"]] = f"functions_{len(renamed)}_{chance.randrange(1000)}"
            call["id"] = renamed[call["id"]]
        if message["role"] == "tool":
            message["tool_call_id"] = renamed[message["tool_call_id"]]


def rewrite_arguments(messages: Messages, chance: random.Random) -> None:
    """The AI SDK and pydantic-ai serialise arguments again."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            try:
                value = json.loads(function["arguments"] or "{}")
            except ValueError:
                continue
            if isinstance(value, dict):
                value = dict(chance.sample(list(value.items()), len(value)))
            separators = chance.choice(((",", ":"), (", ", ": "), (" , ", " : ")))
            function["arguments"] = json.dumps(
                value, separators=separators, ensure_ascii=chance.random() < 0.5
            )


def respell_content(messages: Messages, chance: random.Random) -> None:
    """null, "" and [] are equal, text becomes parts, and trailing newlines come and go."""
    for message in messages:
        content = message.get("content")
        if not content:
            message["content"] = chance.choice((None, "", []))
        elif isinstance(content, str):
            middle = chance.randrange(len(content) + 1)
            parts = [{"type": "text", "text": text} for text in (content[:middle], content[middle:])]
            parts[-1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
            message["content"] = chance.choice((content, content.rstrip(), f"{content}\n", parts))


def reorder_results(messages: Messages, chance: random.Random) -> None:
    """Results come in the order in which the tools ended."""
    start = 0
    while start < len(messages):
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        run = messages[start:end]
        chance.shuffle(run)
        messages[start:end] = run
        start = end + 1


CHANGES = (
    drop_reasoning,
    respace_reasoning,
    rewrite_ids,
    rewrite_arguments,
    respell_content,
    reorder_results,
)


def changed(messages: Messages, seed: int) -> Messages:
    """The messages as some client sends them back."""
    chance = random.Random(seed)
    messages = copy.deepcopy(messages)
    for change in CHANGES:
        if chance.random() < 0.6:
            change(messages, chance)
    return messages
