"""Draws worlds: which tools there are, and the files, tables and stored values behind them."""

from random import Random
from typing import Final

from model.tasks import lexicon
from model.tasks.environment import CALCULATOR, FILE_TOOLS, STORE_TOOLS, Table, Tool, World
from model.tasks.lexicon import Split

_BUSY_SHARE: Final = 0.06
_KEYS: Final = ("name", "id", "key", "city", "location", "query", "code", "target")


def draw(rng: Random, split: Split) -> World:
    """A world with file tools, store, calculator and look-up tables, or some of them."""
    drawn = (_table(rng, split) for _ in range(rng.choice((1, 1, 2, 2, 3))))
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


def _table(rng: Random, split: Split) -> Table:
    noun = lexicon.noun(rng, split)
    fields = lexicon.fields(rng)
    key = rng.choice((*_KEYS, noun.rpartition("_")[2]))
    spoken = noun.replace("_", " ")
    description = rng.choice(
        (f"Look up a {spoken}: {', '.join(fields)}.", f"Returns {', '.join(fields)} of a {spoken}.")
    )
    tool = Tool(f"{rng.choice(lexicon.VERBS)}_{noun}", description, {key: f"which {spoken}"})
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
