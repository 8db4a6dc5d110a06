"""The scripted tasks: the solver solves them, splits share no value, the tools answer as tools do."""

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.encoding import head_segments
from model.tasks import lexicon, talk
from model.tasks.environment import CALCULATOR, FILE_TOOLS, STORE_TOOLS, Environment, World, calls_of
from model.tasks.lexicon import Split, split_of
from model.tasks.session import Session
from model.tasks.task import play


def test_every_task_is_solved_by_valid_calls() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(60):
        session = Session.draw(Random(seed), Split.HELD_OUT)
        for _ in range(25):
            task = session.next_task()
            twin = session.environment.fork()
            played = play(task, session.environment)
            assert played.messages[-1]["role"] == "assistant" and not calls_of(played.messages[-1])
            assert all(value in played.messages[-1]["content"] for value in played.values)
            for message in played.messages:
                for name, arguments in calls_of(message):
                    assert twin.call(name, arguments).is_valid
            assert twin.state() == session.environment.state()
            session.keep(task.fact)
            kinds[task.kind] += 1
    assert kinds.keys() == {
        "chat", "copy", "remember", "secret", "recall", "lookup", "parallel", "compute", "store", "calculate",
        "put", "get", "read", "edit", "retry", "grep", "run", "fix",
    }  # fmt: skip


def test_busy_tools_and_wrong_guesses_are_tried_again() -> None:
    texts = Counter()
    for seed in range(40):
        session = Session.draw(Random(seed), Split.TRAIN)
        for _, messages in zip(range(25), session.messages(), strict=False):
            for message in messages:
                if message["role"] == "tool":
                    content = message["content"]
                    texts["busy"] += content.endswith("try again")
                    texts["missing"] += content.startswith("error: no ")
                    texts["hint"] += "did you mean" in content
                    texts["not found"] += content.startswith("error: text not found")
    assert all(texts[name] > 5 for name in ("busy", "missing", "hint", "not found"))


def test_facts_come_back_many_turns_later() -> None:
    session = Session.draw(Random(1), Split.TRAIN)
    told: dict[str, int] = {}
    distances = []
    for turn in range(120):
        task = session.next_task()
        if task.kind == "recall":
            distances.append(turn - told[task.prompt])
        elif task.fact:
            told[task.fact.question] = turn
            session.keep(task.fact)
        play(task, session.environment)
    assert max(distances) > 40


@given(st.integers(0, 10_000))
def test_splits_share_no_value_and_no_tool(seed: int) -> None:
    for split in Split:
        rng = Random(seed)
        assert split_of(lexicon.value(rng, split)) is split
        assert split_of(lexicon.code(rng, split)) is split
        assert split_of(lexicon.noun(rng, split)) is split


def test_a_secret_stands_in_the_reasoning_alone() -> None:
    task = talk.secret(Random(0), World(()), Split.TRAIN)
    assert task.fact is not None and task.fact.is_secret
    (message,) = play(task, Environment(World(()))).messages
    assert task.fact.value in message["reasoning_content"]
    assert task.fact.value not in message["content"] and task.fact.value not in task.prompt


@pytest.fixture
def environment() -> Environment:
    world = World((*FILE_TOOLS, *STORE_TOOLS, CALCULATOR), files={"src/a.py": ["limit = 5", "def f(x):"]})
    return Environment(world)


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("read", {"path": "src/a.py"}, "1 | limit = 5\n2 | def f(x):"),
        ("read", {"path": "lib/a.py"}, "error: no file named lib/a.py, did you mean src/a.py?"),
        ("grep", {"pattern": "def f"}, "src/a.py:2: def f(x):"),
        ("grep", {"pattern": "class"}, "error: no line contains class"),
        ("edit", {"path": "src/a.py", "old": "5", "new": "6"}, "edited src/a.py line 1"),
        ("edit", {"path": "src/a.py", "old": "7", "new": "6"}, "error: text not found in src/a.py"),
        ("run", {"command": "wc -l src/a.py"}, "2 src/a.py"),
        ("run", {"command": "rm -rf src"}, "error: unknown command rm -rf src"),
        ("calculator", {"expression": "12 * 3 - 40"}, "-4"),
        ("calculator", {"expression": "2 ** 99"}, "error: only whole numbers, +, - and *"),
        ("calculator", {"expression": "__import__('os')"}, "error: only whole numbers, +, - and *"),
        ("kv_get", {"key": "x"}, "error: no key named x"),
    ],
)  # fmt: skip
def test_tools(environment: Environment, tool: str, arguments: dict[str, str], text: str) -> None:
    outcome = environment.call(tool, json.dumps(arguments))
    assert (outcome.text, outcome.is_valid) == (text, True)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("delete", "{}"), ("read", "{"), ("read", "{}"), ("read", '{"path": 3}'), ("read", '["src/a.py"]')],
)
def test_calls_that_fit_no_schema_are_invalid(environment: Environment, tool: str, arguments: str) -> None:
    outcome = environment.call(tool, arguments)
    assert not outcome.is_valid and outcome.text.startswith("error: ")


def test_coined_words_are_in_no_list_and_nouns_belong_to_their_split() -> None:
    rng = Random(3)
    words = [lexicon.word(rng) for _ in range(400)]
    coined = [word for word in words if word not in lexicon.WORDS]
    assert 40 < len(coined) < 130 and all(word.isalpha() and word.islower() for word in coined)
    for split in Split:
        nouns = [lexicon.noun(rng, split) for _ in range(60)]
        assert all(split_of(noun) is split for noun in nouns)
        assert any(noun.partition("_")[0] in lexicon.THINGS for noun in nouns)


def test_reasoning_quotes_the_declaration_of_the_tool_it_calls() -> None:
    quoted = 0
    for seed in range(30):
        session = Session.draw(Random(seed), Split.TRAIN)
        head = "".join(text for text, _ in head_segments(session.environment.schema()))
        for _, messages in zip(range(10), session.messages(), strict=False):
            for message in messages:
                _, found, quote = message.get("reasoning_content", "").partition(" Tool for a")
                if found:
                    assert quote.removesuffix(" one call each") in head
                    (name, arguments), *_ = calls_of(message)
                    assert f'"name":"{name}"' in quote and f'"{next(iter(json.loads(arguments)))}' in quote
                    quoted += 1
    assert quoted > 40
