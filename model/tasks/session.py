"""Sessions: tasks one after another in one conversation, with facts that are asked for many turns later."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeAlias

from model.tasks import files, lookups, talk, world
from model.tasks.environment import CALCULATOR, FILE_TOOLS, PUT, Environment, World
from model.tasks.lexicon import Split
from model.tasks.task import Fact, Task, play

Family: TypeAlias = Callable[[Random, World, Split], Task | None]

_TALK: Final[tuple[tuple[Family, int], ...]] = (
    (talk.small_talk, 2), (talk.repeat, 2), (talk.remember, 3), (talk.secret, 2),
)  # fmt: skip
_FILES: Final[tuple[tuple[Family, int], ...]] = (
    (files.read_setting, 4), (files.read_line, 2), (files.edit_setting, 3), (files.edit_blind, 2),
    (files.grep, 2), (files.count_lines, 1), (files.fix_test, 3),
)  # fmt: skip
_RECALL_SHARE: Final = 0.14
_MAX_FACTS: Final = 24


def families(setting: World) -> list[tuple[Family, int]]:
    """The families of tasks that a world's tools can serve, with their weights."""
    tools = {tool.name for tool in setting.tools}
    found: list[tuple[Family, int]] = list(_TALK)
    if setting.tables:
        found.append((lookups.lookup, 8))
    if CALCULATOR.name in tools:
        found.append((lookups.calculate, 3))
        if setting.tables:
            found.append((lookups.lookup_and_compute, 3))
    if PUT.name in tools:
        found += [(lookups.put, 3), (lookups.get, 3)]
        if setting.tables:
            found.append((lookups.lookup_and_store, 3))
    if FILE_TOOLS[0].name in tools:
        found += _FILES
    return found


@dataclass(slots=True)
class Session:
    """A conversation as it is drawn: an endless stream of tasks about one world."""

    rng: Random
    split: Split
    environment: Environment
    facts: list[Fact] = field(default_factory=list[Fact])
    calls: int = 0

    @classmethod
    def draw(cls, rng: Random, split: Split) -> "Session":
        """A fresh session; one in twelve has no tools."""
        setting = World(()) if rng.random() < 1 / 12 else world.draw(rng, split)
        return cls(rng, split, Environment(setting))

    def next_task(self) -> Task:
        """Draw the next request: a fact of an earlier turn, or a new task."""
        rng = self.rng
        if self.facts and rng.random() < _RECALL_SHARE:
            return talk.recall(rng.choice(self.facts))
        choices = families(self.environment.world)
        while True:
            (family,) = rng.choices([f for f, _ in choices], [w for _, w in choices])
            if (task := family(rng, self.environment.world, self.split)) is not None:
                return task

    def keep(self, fact: Fact | None) -> None:
        """Let later turns ask for a fact. One that answers the same question is replaced."""
        if fact is None:
            return
        self.facts = [known for known in self.facts if known.question != fact.question]
        self.facts.append(fact)
        if len(self.facts) > _MAX_FACTS:
            self.facts.pop(self.rng.randrange(len(self.facts)))

    def messages(self) -> Iterator[list[dict[str, Any]]]:
        """The messages of one task after another, as an ideal agent plays them; without end."""
        while True:
            task = self.next_task()
            played = play(task, self.environment, self.calls)
            self.calls += sum(len(message.get("tool_calls", ())) for message in played.messages)
            self.keep(task.fact)
            yield [{"role": "user", "content": task.prompt}, *played.messages]
