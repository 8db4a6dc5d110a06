"""Draws worlds: which tools there are, and the files, tables and stored values behind them."""

from dataclasses import dataclass
from random import Random
from typing import Final, Self

from model.tasks import lexicon
from model.tasks.environment import CALCULATOR, FILE_TOOLS, STORE_TOOLS, Table, Tool, World
from model.tasks.lexicon import Split

_BUSY_SHARE: Final = 0.06
_KEYS: Final = ("name", "id", "key")


@dataclass(frozen=True, slots=True)
class Naming:
    """How look-up tools are named: a verb before the noun; the argument, at times by the noun as well."""

    verbs: tuple[str, ...] = lexicon.VERBS
    keys: tuple[str, ...] = _KEYS
    has_noun_keys: bool = True

    @classmethod
    def uniform(cls, rng: Random) -> Self:
        """One verb and one name of the argument for all tools."""
        return cls((rng.choice(lexicon.VERBS),), (rng.choice(_KEYS),), False)


MIXED: Final = Naming()
"""Every tool as it comes."""


def draw(rng: Random, split: Split, naming: Naming = MIXED) -> World:
    """A world with file tools, store, calculator and look-up tables, or some of them."""
    drawn = (_table(rng, split, naming) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    tables = {table.tool.name: table for table in drawn}
    tools = [table.tool for table in tables.values()]
    has_files, has_store = rng.random() < 0.7, rng.random() < 0.7
    tools += FILE_TOOLS if has_files else ()
    tools += STORE_TOOLS if has_store else ()
    tools += (CALCULATOR,) if rng.random() < 0.7 else ()
    rng.shuffle(tools)
    world = World(tuple(tools), tables)
    if has_files:
        for _ in range(rng.randrange(2, 6)):
            world.files[lexicon.path(rng)] = _file(rng, split)
    world.busy = {
        (name, entity)
        for name, table in tables.items()
        for entity in table.rows
        if rng.random() < _BUSY_SHARE
    }
    return world


def _table(rng: Random, split: Split, naming: Naming) -> Table:
    noun = lexicon.noun(rng, split)
    fields = tuple(rng.sample(lexicon.FIELDS, rng.randrange(2, 5)))
    own_key = (noun.rpartition("_")[2],) if naming.has_noun_keys else ()
    key = rng.choice((*naming.keys, *own_key))
    spoken = noun.replace("_", " ")
    description = rng.choice(
        (f"Look up a {spoken}: {', '.join(fields)}.", f"Returns {', '.join(fields)} of a {spoken}.")
    )
    tool = Tool(f"{rng.choice(naming.verbs)}_{noun}", description, {key: f"which {spoken}"})
    rows = {
        lexicon.entity(rng): {
            field: lexicon.number(rng, split) if rng.random() < 0.3 else lexicon.value(rng, split)
            for field in fields
        }
        for _ in range(rng.randrange(4, 10))
    }
    return Table(tool, noun, key, fields, rows, rng.random() < 0.5)


def _file(rng: Random, split: Split) -> list[str]:
    lines: list[str] = []
    names: set[str] = set()
    for _ in range(rng.randrange(3, 13)):
        name = f"{rng.choice(lexicon.WORDS)}_{rng.choice(lexicon.FIELDS)}"
        if name in names:
            continue
        names.add(name)
        kind = rng.random()
        if kind < 0.7:
            lines.append(f"{name} = {lexicon.value(rng, split)}")
        elif kind < 0.85:
            lines += [
                f"def {name}({rng.choice(lexicon.WORDS)}):",
                f"    return {rng.choice(lexicon.WORDS)}({name})",
            ]
        else:
            lines.append(f"# {' '.join(rng.choice(lexicon.WORDS) for _ in range(rng.randrange(2, 7)))}")
    return lines
