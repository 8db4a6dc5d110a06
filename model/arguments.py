"""Checks an engine command against SGLang's own argument parser, without starting an engine.

Importing that parser takes ten seconds and torch with it, so it happens in a process of its own
(`python -m model.arguments`, JSON on its input and output), and a check that passed is remembered.
"""

import argparse
import difflib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from model.profile import EngineCommand, ProfileError

CHECK_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Problem:
    """An argument that SGLang's parser refuses; `nearest` is what was probably meant."""

    flag: str
    value: str | None
    reason: str
    nearest: str | None

    def __str__(self) -> str:
        shown = self.flag if self.value is None else f"{self.flag} {self.value}"
        hint = "" if self.nearest is None else f"; did you mean {self.nearest}?"
        return f"{shown}: {self.reason}{hint}"


def is_sglang_installed() -> bool:
    """Whether an engine can run in this environment at all."""
    return find_spec("sglang") is not None


def verify(profile: str, command: EngineCommand, *, memory: Path | None = None) -> None:
    """Raise `ProfileError` naming the profile and every argument that SGLang would refuse.

    `memory` is a directory in which passed checks are remembered, so that the next start need not wait.
    """
    marker = None
    if memory is not None:
        marker = memory / _digest(command)
        if marker.exists():
            return
    problems = check([command.argv[3:]], command.env)[0]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        version = importlib.metadata.version("sglang")
        raise ProfileError(f"profile {profile}: SGLang {version} refuses\n{listed}")
    if marker is not None:
        # The memory only saves time: where it can't be written, the next start checks again.
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def check(commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> list[list[Problem]]:
    """For each list of arguments, what SGLang's parser refuses in it; one process for all of them.

    `env` is added to the environment, since it decides which plug-ins load and so which values are known.
    Raises `ProfileError` when the parser itself can't be loaded.
    """
    result = subprocess.run(
        [sys.executable, "-m", "model.arguments"],
        input=json.dumps([list(words) for words in commands]),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProfileError(f"SGLang's argument parser does not load ({last}): run `longhaul doctor`")
    answer = json.loads(result.stdout.splitlines()[-1])
    return [[Problem(**problem) for problem in problems] for problems in answer]


def _digest(command: EngineCommand) -> str:
    """Identity of a check: all of the command but the paths and the port, and SGLang's version."""
    versions = [importlib.metadata.version("sglang"), importlib.metadata.version("longhaul")]
    free = {"--model-path", "--port", "--speculative-draft-model-path"}
    words = [
        word for before, word in zip(["", *command.argv], command.argv, strict=False) if before not in free
    ]
    text = json.dumps([versions, words, sorted(command.env.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Refused(Exception):
    """What argparse would have printed before it exits."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)

    def actions(self) -> dict[str, argparse.Action]:
        """Every option string with what handles it."""
        return self._option_string_actions


def _groups(words: Sequence[str]) -> Iterable[list[str]]:
    """Each flag with the words that follow it."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def problems_in(parser: _Parser, words: Sequence[str]) -> list[Problem]:
    """What `parser` refuses in `words`: each argument is parsed alone, so that all are found at once."""
    found: list[Problem] = []
    for group in _groups(words):
        flag, _, inline = group[0].partition("=")
        value = inline or " ".join(group[1:]) or None
        try:
            # SGLang requires a model; every argument but that one is parsed beside it.
            _, unknown = parser.parse_known_args(
                [*group] if flag == "--model-path" else ["--model-path=.", *group]
            )
        except _Refused as refusal:
            found.append(_refusal(parser, flag, value, str(refusal)))
            continue
        if flag in {word.partition("=")[0] for word in unknown}:
            near = difflib.get_close_matches(flag, parser.actions(), n=1, cutoff=0.5)
            found.append(Problem(flag, value, "there is no such flag", near[0] if near else None))
        elif unknown:
            found.append(Problem(flag, value, f"takes no value {' '.join(unknown)!r}", None))
    return found


def _refusal(parser: _Parser, flag: str, value: str | None, message: str) -> Problem:
    action = parser.actions().get(flag)
    choices = [str(choice) for choice in (action.choices or ())] if action is not None else []
    if choices and value is not None and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.0)
        return Problem(flag, value, "no such value", near[0] if near else None)
    return Problem(flag, value, message.removeprefix(f"argument {flag}: "), None)


def main() -> int:
    """Check the commands on standard input; one line of JSON comes out."""
    commands: list[list[str]] = json.load(sys.stdin)
    # What the engine itself does before it parses: plug-ins register their backends' names.
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = _Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    print(json.dumps([[asdict(problem) for problem in problems_in(parser, words)] for words in commands]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
