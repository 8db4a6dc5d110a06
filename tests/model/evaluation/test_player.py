"""Playing and judging, against a client that answers as the ideal agent does, or as a bad one."""

import json
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from model.evaluation.player import Conversation, Tally, chosen, fact_of
from model.tasks import talk
from model.tasks.environment import Environment, World
from model.tasks.lexicon import Split
from model.tasks.session import Session
from model.tasks.task import Task, play


class Agent:
    """Stands for `OpenAI`: answers with the replies that it is given, in order, after `spoil`."""

    def __init__(self, spoil: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message) -> None:
        self.replies: list[dict[str, Any]] = []
        self.seen: list[list[dict[str, Any]]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._spoil = spoil

    def expect(self, task: Task, environment: Environment) -> None:
        played = play(task, environment.fork())
        self.replies += [self._spoil(m) for m in played.messages if m["role"] == "assistant"]

    def _create(self, *, messages: list[dict[str, Any]], **_: Any) -> Any:
        self.seen.append(messages)
        reply = self.replies.pop(0)
        calls = [
            SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
            for call in reply.get("tool_calls", ())
        ]
        message = SimpleNamespace(
            content=reply["content"], reasoning_content=reply["reasoning_content"], tool_calls=calls or None
        )
        return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=None)


def test_the_ideal_agent_does_everything_right() -> None:
    tally, calls, valid = Tally(), 0, 0
    for seed in range(30):
        session = Session.draw(Random(seed), Split.HELD_OUT)
        agent = Agent()
        conversation = Conversation(agent, session.environment)  # pyright: ignore[reportArgumentType]
        for _ in range(8):
            task = session.next_task()
            if task.kind == "recall":  # its answer is the fact's, which is empty for a secret that was chosen
                continue
            agent.expect(task, session.environment)
            judgement = conversation.play(task)
            assert judgement.is_right, (task, judgement)
            tally.add(judgement)
            session.keep(fact_of(task, judgement))
        assert not any("reasoning_content" in message for message in agent.seen[-1])
        calls, valid = calls + conversation.counts.calls, valid + conversation.counts.valid_calls
    assert calls == valid > 100
    assert tally.exact_copies == tally.copies
    assert set(tally.by_kind().values()) == {1.0}


def test_a_wrong_answer_and_a_wrong_world_are_told() -> None:
    def forget(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": "I do not know."} if "tool_calls" not in message else message

    def misspell(message: dict[str, Any]) -> dict[str, Any]:
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps({key: value + "x" for key, value in arguments.items()})
        return message

    wrong = Tally()
    for spoil in (forget, misspell):
        for seed in range(20):
            session = Session.draw(Random(seed), Split.HELD_OUT)
            agent = Agent(spoil)
            conversation = Conversation(agent, session.environment)  # pyright: ignore[reportArgumentType]
            task = session.next_task()
            while task.kind not in ("put", "store"):
                if len(session.environment.world.tools) < 2:
                    session = Session.draw(Random(seed + 1000), Split.HELD_OUT)
                    conversation = Conversation(agent, session.environment)  # pyright: ignore[reportArgumentType]
                if not any(tool.name == "kv_put" for tool in session.environment.world.tools):
                    break
                task = session.next_task()
            else:
                agent.expect(task, session.environment)
                wrong.add(conversation.play(task))
    assert sum(wrong.played.values()) > 10
    assert set(wrong.by_kind().values()) == {0.0}


def test_a_secret_is_what_the_model_chose() -> None:
    task = talk.secret(Random(0), World(()), Split.HELD_OUT)

    def choose(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "reasoning_content": "I choose ZZ-123-456 as the code."}

    agent = Agent(choose)
    agent.expect(task, Environment(World(())))
    conversation = Conversation(agent, Environment(World(())))  # pyright: ignore[reportArgumentType]
    judgement = conversation.play(task)
    fact = fact_of(task, judgement)
    assert judgement.is_right and fact is not None and fact.value == "ZZ-123-456"
    assert chosen("none") is None
