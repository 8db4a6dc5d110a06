"""Tasks on look-up tables, the calculator and the key-value store."""

import json
from collections.abc import Generator
from random import Random

from model.tasks import lexicon
from model.tasks.environment import Table, World
from model.tasks.lexicon import Split
from model.tasks.task import Call, Fact, Reply, Solution, Task


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _field(table: Table, text: str, field: str) -> str:
    if table.as_json:
        return json.loads(text)[field]
    prefix = f"{field}: "
    return next(line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix))


def _ask(table: Table, entity: str) -> Call:
    return Call(table.tool.name, {table.key: entity})


def _quote(table: Table) -> str:
    """A tool's declaration as K3's head spells it, from the spoken noun to the argument."""
    noun = f" {table.noun.replace('_', ' ')}"
    _, _, after = table.tool.description.partition(noun)
    return f'{noun}{after}","name":"{table.tool.name}","parameters":{{"properties":{{"{table.key}'


def _fetch(
    table: Table, field: str, entities: list[str], what: str
) -> Generator[Reply, list[str], dict[str, str]]:
    """Ask for all entities at once, again for those that were busy; the caller sees the last results.

    The reasoning quotes the tool's declaration from the noun to the argument: words before a match are hard
    to find for a model this small, words after it are not.
    """
    name = table.tool.name
    each = "" if len(entities) == 1 else " one call each"
    results = yield Reply(
        f"I need the {field} of {_enumerate(entities)}{what}. Tool for a{_quote(table)}{each}",
        calls=tuple(_ask(table, entity) for entity in entities),
    )
    known = dict(zip(entities, results, strict=True))
    if again := [entity for entity in entities if known[entity].endswith("try again")]:
        results = yield Reply(
            f"{name} was busy for {_enumerate(again)}. I try again.",
            calls=tuple(_ask(table, entity) for entity in again),
        )
        known |= dict(zip(again, results, strict=True))
    return known


def lookup(rng: Random, world: World, split: Split) -> Task:
    """One to four entities of a table; now and then one that does not exist."""
    table = rng.choice(list(world.tables.values()))
    field = rng.choice(table.fields)
    entities = rng.sample(list(table.rows), min(len(table.rows), rng.choice((1, 1, 1, 2, 2, 3, 4))))
    noun = table.noun.replace("_", " ")
    if len(entities) == 1 and rng.random() < 0.12:
        entities = [f"{rng.choice(lexicon.WORDS)} {rng.randrange(10, 1000)}"]
    asked = _enumerate(entities)
    prompt = rng.choice(
        (
            f"What is the {field} of {noun} {asked}?",
            f"Tell me the {field} of the {noun} {asked}.",
            f"{asked} ({noun}): {field}?",
            f"Please look up the {noun} {asked}. I want the {field}.",
        )
    )

    def solve() -> Solution:
        known: dict[str, str] = yield from _fetch(table, field, entities, "")
        lines: list[str] = []
        values: list[str] = []
        for entity in entities:
            if known[entity].startswith("error"):
                lines.append(f"There is no {noun} named {entity}.")
                values.append(f"no {noun}")
                continue
            found = _field(table, known[entity], field)
            values.append(found)
            lines.append(f"The {field} of {entity} is {found}.")
        yield Reply(
            f"{table.tool.name} answered for {_enumerate(entities)}.", "\n".join(lines), (), tuple(values)
        )

    row = table.rows.get(entities[0])
    fact = (
        Fact(
            f"Earlier you looked up the {noun} {entities[0]}. What was the {field}? Do not look again.",
            f"I looked up {entities[0]} before: the {field} was {row[field]}.",
            f"The {field} of {entities[0]} was {row[field]}.",
            row[field],
        )
        if row
        else None
    )
    return Task("parallel" if len(entities) > 1 else "lookup", prompt, solve, fact)


def _numeric(rng: Random, table: Table) -> tuple[str, str] | None:
    cells = [(e, f) for e, row in table.rows.items() for f, value in row.items() if value.isdecimal()]
    return rng.choice(cells) if cells else None


def lookup_and_compute(rng: Random, world: World, split: Split) -> Task | None:
    """A number from a table goes into the calculator."""
    table = rng.choice(list(world.tables.values()))
    if (cell := _numeric(rng, table)) is None:
        return None
    entity, field = cell
    noun, sign = table.noun.replace("_", " "), rng.choice("+-*")
    operand = lexicon.number(rng, split) if sign != "*" else str(rng.randrange(12, 1000))
    what = {"+": f"plus {operand}", "-": f"minus {operand}", "*": f"times {operand}"}[sign]
    prompt = rng.choice(
        (
            f"What is the {field} of {noun} {entity} {what}?",
            f"Compute the {field} of the {noun} {entity} {what}.",
        )
    )

    def solve() -> Solution:
        known: dict[str, str] = yield from _fetch(table, field, [entity], f" {what}")
        found = _field(table, known[entity], field)
        results = yield Reply(
            f"The {field} is {found}. Now {found} {what}.",
            calls=(Call("calculator", {"expression": f"{found} {sign} {operand}"}),),
        )
        yield Reply(f"The result is {results[0]}.", f"The result is {results[0]}.", (), (results[0],))

    return Task("compute", prompt, solve)


def lookup_and_store(rng: Random, world: World, split: Split) -> Task:
    """A cell of a table is stored under a key."""
    table = rng.choice(list(world.tables.values()))
    entity, field = rng.choice(list(table.rows)), rng.choice(table.fields)
    noun, key = table.noun.replace("_", " "), _key(rng)
    prompt = rng.choice(
        (
            f"Store the {field} of {noun} {entity} under {key}.",
            f"Look up the {noun} {entity} and save its {field} as {key}.",
        )
    )

    def solve() -> Solution:
        known: dict[str, str] = yield from _fetch(table, field, [entity], "")
        found = _field(table, known[entity], field)
        yield Reply(
            f"The {field} is {found}. I store it under {key}.",
            calls=(Call("kv_put", {"key": key, "value": found}),),
        )
        yield Reply("It is stored.", f"Stored {found} under {key}.", (), (found, key))

    return Task("store", prompt, solve)


def calculate(rng: Random, world: World, split: Split) -> Task:
    """One or two sums for the calculator."""
    sums: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        parts = [lexicon.number(rng, split)]
        for _ in range(rng.choice((1, 1, 2))):
            parts += [rng.choice("+-*"), str(rng.randrange(12, 1000))]
        sums.append(" ".join(parts))
    asked = _enumerate(sums)
    prompt = rng.choice((f"Compute {asked}.", f"What is {asked}?", f"Please calculate {asked}."))

    def solve() -> Solution:
        results = yield Reply(
            "I use the calculator.", calls=tuple(Call("calculator", {"expression": x}) for x in sums)
        )
        lines = [f"{x} = {result}" for x, result in zip(sums, results, strict=True)]
        yield Reply(f"The results are {_enumerate(results)}.", "\n".join(lines), (), tuple(results))

    return Task("calculate", prompt, solve)


def _key(rng: Random) -> str:
    return f"{rng.choice(lexicon.WORDS)}.{rng.choice(lexicon.FIELDS)}"


def put(rng: Random, world: World, split: Split) -> Task:
    """One or two values go into the store."""
    pairs = {_key(rng): lexicon.value(rng, split) for _ in range(rng.choice((1, 1, 2)))}
    asked = _enumerate([f"{value} under {key}" for key, value in pairs.items()])
    prompt = rng.choice((f"Store {asked}.", f"Please save {asked}.", f"Put {asked} into the store."))

    def solve() -> Solution:
        yield Reply(
            f"I store {_enumerate(list(pairs))}.",
            calls=tuple(Call("kv_put", {"key": key, "value": value}) for key, value in pairs.items()),
        )
        yield Reply("It is stored.", f"Stored {asked}.", (), tuple(pairs.values()))

    return Task("put", prompt, solve)


def get(rng: Random, world: World, split: Split) -> Task:
    """One or two keys of the store, or one that does not exist."""
    keys = rng.sample(list(world.store), min(len(world.store), rng.choice((1, 1, 2))))
    if not keys or rng.random() < 0.15:
        keys = [_key(rng)]
    asked = _enumerate(keys)
    prompt = rng.choice(
        (f"What is stored under {asked}?", f"Get {asked} from the store.", f"Value of {asked}?")
    )

    def solve() -> Solution:
        results = yield Reply(
            f"I get {asked} from the store.", calls=tuple(Call("kv_get", {"key": key}) for key in keys)
        )
        lines: list[str] = []
        values: list[str] = []
        for key, result in zip(keys, results, strict=True):
            if result.startswith("error: no key"):
                lines.append(f"There is no key {key}.")
                values.append(f"no key {key}")
            else:
                lines.append(f"{key} holds {result}.")
                values.append(result)
        yield Reply(f"The store answered for {asked}.", "\n".join(lines), (), tuple(values))

    return Task("get", prompt, solve)
