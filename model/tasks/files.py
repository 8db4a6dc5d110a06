"""Tasks on files: reading, searching, editing, running tests."""

import re
from collections.abc import Generator
from random import Random

from model.tasks import lexicon
from model.tasks.environment import Check, World
from model.tasks.lexicon import Split
from model.tasks.task import Call, Fact, Reply, Solution, Task

_SETTING = re.compile(r"^(\w+) = (\S.*)$")


def settings(lines: list[str]) -> dict[str, str]:
    """The settings of a file, `name = value` a line."""
    return {m[1]: m[2] for line in lines if (m := _SETTING.match(line))}


def _pick(rng: Random, world: World) -> tuple[str, str, str] | None:
    found = [(path, *pair) for path, lines in world.files.items() for pair in settings(lines).items()]
    return rng.choice(found) if found else None


def _read(path: str, why: str) -> Generator[Reply, list[str], tuple[str, str]]:
    """Read a file, following one hint at its right path; the path that worked and the text."""
    results = yield Reply(f"{why} I read {path}.", calls=(Call("read", {"path": path}),))
    if hint := re.search(r"did you mean (.+)\?", results[0]):
        path = hint[1]
        results = yield Reply(f"The file is {path}. I read it.", calls=(Call("read", {"path": path}),))
    return path, results[0]


def _line(text: str, setting: str) -> tuple[str, str]:
    """Number and value of a setting in what `read` returned."""
    match = re.search(rf"^(\d+) \| {setting} = (.*)$", text, re.MULTILINE)
    assert match, f"no {setting} in {text!r}"
    return match[1], match[2]


def _wrong_folder(rng: Random, world: World, path: str) -> str | None:
    """The file's name in another folder, where it alone has that name: a hint at it names no other file."""
    folder, _, name = path.rpartition("/")
    if sum(other.rpartition("/")[2] == name for other in world.files) > 1:
        return None
    return f"{rng.choice([x for x in lexicon.DIRECTORIES if x != folder])}/{name}"


def read_setting(rng: Random, world: World, split: Split) -> Task | None:
    """The value of a setting; sometimes the user names the wrong folder."""
    if (picked := _pick(rng, world)) is None:
        return None
    path, setting, value = picked
    asked = path
    if rng.random() < 0.2 and (wrong := _wrong_folder(rng, world, path)) is not None:
        asked = wrong
    prompt = rng.choice(
        (
            f"What is {setting} in {asked}?",
            f"Which value does {setting} have in {asked}?",
            f"Read {asked} and tell me {setting}.",
        )
    )

    def solve() -> Solution:
        where, text = yield from _read(asked, f"The user wants {setting}.")
        number, found = _line(text, setting)
        yield Reply(
            f"Line {number} says {setting} = {found}.", f"{setting} in {where} is {found}.", (), (found,)
        )

    fact = Fact(
        f"You read {setting} in {asked} before. What was it? Do not read it again.",
        f"I read {setting} before: it was {value}.",
        f"{setting} was {value}.",
        value,
    )
    return Task("read", prompt, solve, fact)


def read_line(rng: Random, world: World, split: Split) -> Task | None:
    """One line of a file, copied exactly."""
    if not world.files:
        return None
    path = rng.choice(list(world.files))
    number = rng.randrange(len(world.files[path])) + 1
    prompt = rng.choice((f"What does line {number} of {path} say?", f"Show me line {number} of {path}."))

    def solve() -> Solution:
        _, text = yield from _read(path, f"The user wants line {number}.")
        line = text.splitlines()[number - 1].partition(" | ")[2]
        yield Reply(f"Line {number} is what I copy.", line, (), (line,))

    return Task("copy", prompt, solve)


def edit_setting(rng: Random, world: World, split: Split) -> Task | None:
    """A new value for a setting."""
    if (picked := _pick(rng, world)) is None:
        return None
    path, setting, _ = picked
    new = lexicon.value(rng, split)
    prompt = rng.choice(
        (
            f"Set {setting} to {new} in {path}.",
            f"In {path}, change {setting} to {new}.",
            f"Please edit {path}: {setting} has to be {new}.",
        )
    )

    def solve() -> Solution:
        where, text = yield from _read(path, f"I have to set {setting} to {new}.")
        number, old = _line(text, setting)
        yield from _edit(where, number, setting, old, new)
        yield Reply(f"{where} is edited.", f"{setting} in {where} is now {new}.", (), (new,))

    return Task("edit", prompt, solve)


def _edit(path: str, number: str, setting: str, old: str, new: str) -> Solution:
    yield Reply(
        f"Line {number} is {setting} = {old}. I change it to {new}.",
        calls=(Call("edit", {"path": path, "old": f"{setting} = {old}", "new": f"{setting} = {new}"}),),
    )


def edit_blind(rng: Random, world: World, split: Split) -> Task | None:
    """The user gives the old value, often wrongly: the edit fails, the agent reads and tries again."""
    if (picked := _pick(rng, world)) is None:
        return None
    path, setting, value = picked
    new = lexicon.value(rng, split)
    told = value if rng.random() < 0.4 else lexicon.value(rng, split)
    prompt = rng.choice(
        (
            f"Replace {setting} = {told} by {setting} = {new} in {path}.",
            f"In {path}, replace {setting} = {told} by {setting} = {new}.",
        )
    )

    def solve() -> Solution:
        results = yield Reply(
            f"I replace {setting} = {told} in {path}.",
            calls=(Call("edit", {"path": path, "old": f"{setting} = {told}", "new": f"{setting} = {new}"}),),
        )
        if results[0].startswith("error"):
            where, text = yield from _read(path, "The text is not there.")
            number, old = _line(text, setting)
            yield from _edit(where, number, setting, old, new)
        yield Reply(f"{path} is edited.", f"{setting} in {path} is now {new}.", (), (new,))

    return Task("retry", prompt, solve)


def grep(rng: Random, world: World, split: Split) -> Task | None:
    """Where a setting or a function stands."""
    if not world.files:
        return None
    path = rng.choice(list(world.files))
    line = rng.choice(world.files[path])
    if not (match := re.match(r"(?:def )?(\w+)", line)):
        return None
    symbol = match[1] if not line.startswith("def ") else f"def {match[1]}"
    prompt = rng.choice((f"Where is {symbol}?", f"Find {symbol} in the files.", f"Which file has {symbol}?"))

    def solve() -> Solution:
        results = yield Reply(f"I search for {symbol}.", calls=(Call("grep", {"pattern": symbol}),))
        first = results[0].splitlines()[0]
        where, number, _ = first.split(":", 2)
        yield Reply(
            f"The first match is in {where}.",
            f"{symbol} is in {where} on line {number}.",
            (),
            (where, number),
        )

    return Task("grep", prompt, solve)


def count_lines(rng: Random, world: World, split: Split) -> Task | None:
    """A shell command and its output."""
    if not world.files:
        return None
    path = rng.choice(list(world.files))
    prompt = rng.choice((f"How many lines has {path}?", f"Count the lines of {path}."))

    def solve() -> Solution:
        results = yield Reply("I count with wc.", calls=(Call("run", {"command": f"wc -l {path}"}),))
        number = results[0].split()[0]
        yield Reply(f"wc says {number}.", f"{path} has {number} lines.", (), (number,))

    return Task("run", prompt, solve)


def fix_test(rng: Random, world: World, split: Split) -> Task | None:
    """A failing test: run it, read the file, edit the setting, run it again."""
    if (picked := _pick(rng, world)) is None:
        return None
    path, setting, value = picked
    wanted = lexicon.value(rng, split) if rng.random() < 0.85 else value
    name = f"tests/test_{rng.choice(lexicon.WORDS)}_{rng.choice(lexicon.WORDS)}.py"
    world.checks[name] = Check(name, path, setting, wanted)
    prompt = rng.choice(
        (f"Make {name} pass.", f"{name} fails. Please fix it.", f"Run {name} and repair what is wrong.")
    )

    def solve() -> Solution:
        command = Call("run", {"command": f"pytest {name}"})
        results = yield Reply(f"I run {name}.", calls=(command,))
        if results[0].startswith("PASSED"):
            yield Reply("It passes already.", f"{name} passes.", (), ("passes",))
            return
        match = re.search(r"^(.+): (\w+) is (.+), expected (.+)$", results[0], re.MULTILINE)
        assert match, results[0]
        file, what, _, expected = match.groups()
        where, text = yield from _read(file, f"{what} has to be {expected}.")
        number, old = _line(text, what)
        yield from _edit(where, number, what, old, expected)
        yield Reply("I run the test again.", calls=(command,))
        yield Reply(
            "It passes now.", f"{name} passes: I set {what} to {expected} in {where}.", (), (expected,)
        )

    return Task("fix", prompt, solve)
