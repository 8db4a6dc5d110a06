"""The scripted tools: files, a key-value store, a calculator and look-up tables, all in memory.

`Environment.call` never raises: whatever a model asks for, it gets a text back as from a real tool, and
`Outcome.is_valid` says whether the call named a tool and fitted its schema.
"""

import ast
import copy
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MAX_DIGITS = 40
_MAX_MATCHES = 8


class ToolFault(Exception):
    """What a tool says when it cannot do what it was asked."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's declaration; every parameter is a required string."""

    name: str
    description: str
    parameters: Mapping[str, str]

    def declaration(self) -> dict[str, Any]:
        """The tool as an OpenAI function."""
        properties = {name: {"type": "string", "description": text} for name, text in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(self.parameters),
                },
            },
        }


READ: Final = Tool("read", "Read a file.", {"path": "path of the file"})
GREP: Final = Tool("grep", "Find lines that contain a text, in all files.", {"pattern": "the text"})
EDIT: Final = Tool(
    "edit",
    "Replace a text in a file.",
    {"path": "path of the file", "old": "text to replace", "new": "new text"},
)
RUN: Final = Tool("run", "Run a shell command.", {"command": "the command"})
CALCULATOR: Final = Tool("calculator", "Compute with whole numbers.", {"expression": "such as 12 * 34"})
PUT: Final = Tool("kv_put", "Store a value under a key.", {"key": "the key", "value": "the value"})
GET: Final = Tool("kv_get", "Get the value of a key.", {"key": "the key"})
FILE_TOOLS: Final = (READ, GREP, EDIT, RUN)
STORE_TOOLS: Final = (PUT, GET)


@dataclass(frozen=True, slots=True)
class Table:
    """A look-up tool: rows by entity, each with the same fields. `as_json` is how it writes a row."""

    tool: Tool
    noun: str
    key: str
    fields: tuple[str, ...]
    rows: Mapping[str, Mapping[str, str]]
    as_json: bool

    def __post_init__(self) -> None:
        assert all(tuple(row) == self.fields for row in self.rows.values()), "a row lacks a field"

    def render(self, entity: str) -> str:
        """The row as text; raises `ToolFault` for an unknown entity."""
        if (row := self.rows.get(entity)) is None:
            raise ToolFault(f"no {self.noun} named {entity}")
        if self.as_json:
            return json.dumps(row)
        return "\n".join(f"{name}: {value}" for name, value in row.items())


@dataclass(frozen=True, slots=True)
class Check:
    """A test that `run` knows: it passes when its file has the line `{setting} = {wanted}`."""

    name: str
    path: str
    setting: str
    wanted: str


@dataclass(slots=True)
class World:
    """All that the tools answer from. `busy` holds calls (tool, key) that fail the first time."""

    tools: tuple[Tool, ...]
    tables: Mapping[str, Table] = field(default_factory=dict[str, Table])
    files: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    store: dict[str, str] = field(default_factory=dict[str, str])
    checks: dict[str, Check] = field(default_factory=dict[str, Check])
    busy: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returned, and whether it named a tool and fitted its schema."""

    text: str
    is_valid: bool


class Environment:
    """Executes calls on a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._tools = {tool.name: tool for tool in world.tools}

    def schema(self) -> list[dict[str, Any]]:
        """The tools as OpenAI functions."""
        return [tool.declaration() for tool in self.world.tools]

    def fork(self) -> "Environment":
        """A copy whose calls leave this one alone."""
        return Environment(copy.deepcopy(self.world))

    def state(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """What calls can change: files and the store, copied."""
        return copy.deepcopy(self.world.files), dict(self.world.store)

    def call(self, name: str, arguments: str | Mapping[str, Any]) -> Outcome:
        """Execute a call; `arguments` as the model wrote them."""
        tool = self._tools.get(name)
        if tool is None:
            return Outcome(f"error: no tool named {name}", False)
        parsed: Any = arguments
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except ValueError:
                return Outcome("error: the arguments are no JSON", False)
        given: Mapping[str, Any] = parsed if isinstance(parsed, Mapping) else {}
        if given.keys() != tool.parameters.keys() or not all(isinstance(v, str) for v in given.values()):
            return Outcome(f"error: {name} takes {', '.join(tool.parameters)}", False)
        try:
            return Outcome(self._execute(name, dict(given)), True)
        except ToolFault as fault:
            return Outcome(f"error: {fault}", True)

    def _execute(self, name: str, given: dict[str, str]) -> str:
        world = self.world
        first = next(iter(given.values()))
        if (name, first) in world.busy:
            world.busy.remove((name, first))
            raise ToolFault(f"{name} is busy, try again")
        if (table := world.tables.get(name)) is not None:
            return table.render(first)
        match name:
            case "read":
                return "\n".join(f"{n} | {line}" for n, line in enumerate(self._file(first), 1))
            case "grep":
                return self._grep(first)
            case "edit":
                return self._edit(given["path"], given["old"], given["new"])
            case "run":
                return self._run(first)
            case "calculator":
                return str(_compute(first))
            case "kv_put":
                world.store[given["key"]] = given["value"]
                return "ok"
            case "kv_get":
                if first not in world.store:
                    raise ToolFault(f"no key named {first}")
                return world.store[first]
            case _:
                raise ToolFault(f"{name} does nothing")

    def _file(self, path: str) -> list[str]:
        if (lines := self.world.files.get(path)) is not None:
            return lines
        name = path.rpartition("/")[2]
        near = next((other for other in self.world.files if other.rpartition("/")[2] == name), None)
        raise ToolFault(f"no file named {path}" + (f", did you mean {near}?" if near else ""))

    def _grep(self, pattern: str) -> str:
        found = [
            f"{path}:{n}: {line}"
            for path, lines in self.world.files.items()
            for n, line in enumerate(lines, 1)
            if pattern in line
        ]
        if not found:
            raise ToolFault(f"no line contains {pattern}")
        return "\n".join(found[:_MAX_MATCHES])

    def _edit(self, path: str, old: str, new: str) -> str:
        lines = self._file(path)
        at = next((n for n, line in enumerate(lines) if old and old in line), None)
        if at is None:
            raise ToolFault(f"text not found in {path}")
        lines[at] = lines[at].replace(old, new, 1)
        return f"edited {path} line {at + 1}"

    def _run(self, command: str) -> str:
        match command.split():
            case ["pytest", name] if name in self.world.checks:
                check = self.world.checks[name]
                prefix = f"{check.setting} = "
                line = next((x for x in self._file(check.path) if x.startswith(prefix)), prefix + "missing")
                found = line.removeprefix(prefix)
                if found == check.wanted:
                    return f"PASSED {name}"
                return f"FAILED {name}\n{check.path}: {check.setting} is {found}, expected {check.wanted}"
            case ["wc", "-l", path]:
                return f"{len(self._file(path))} {path}"
            case ["ls", folder]:
                names = sorted(path for path in self.world.files if path.startswith(f"{folder}/"))
                if not names:
                    raise ToolFault(f"no folder named {folder}")
                return "\n".join(names)
            case _:
                raise ToolFault(f"unknown command {command}")


def _compute(expression: str) -> int:
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ToolFault("the expression cannot be read") from error
    if len(expression) > _MAX_DIGITS:
        raise ToolFault("the expression is too long")

    def evaluate(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(n)):
                return n
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](evaluate(left), evaluate(right))
            case _:
                raise ToolFault("only whole numbers, +, - and *")

    return evaluate(tree)


def calls_of(message: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """(Tool, arguments) of an assistant message's calls."""
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
