"""The `longhaul` console script: one table of commands, each imported only when it is asked for.

A command's module has a docstring (its help), `add_arguments(parser)`, `run(args) -> exit status` and,
optionally, `EXAMPLES` (shown under its help).
"""

import argparse
import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command lives and what it does in one line."""

    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "serve": Command("service.serve", "serve everything on this machine: Redis, engine, gateway"),
    "gateway": Command("service.gateway", "run the gateway alone, in front of a running engine"),
    "engine": Command("model.engine", "run SGLang with a launch profile, or print its command"),
    "model": Command("model.command", "build the tiny K3; train, ship and evaluate the small one"),
    "draft": Command("speculative.command", "train, evaluate and calibrate DSpark drafts"),
    "store": Command("cache_store.command", "look at what engines have stored, and remove it"),
    "replay": Command("replay.command", "replay agent traces against an endpoint"),
    "trace": Command("replay.trace_command", "look at agent traces, and convert logs into them"),
    "plan": Command("model.capacity.command", "plan what a deployment holds: memory, tiers, sessions"),
    "simulate": Command("model.simulation.command", "simulate the cache tiers under agent traffic"),
    "doctor": Command("service.doctor", "check this machine and say what to do about each failure"),
}


def _overview() -> str:
    width = max(len(name) for name in COMMANDS)
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: longhaul COMMAND [OPTIONS]\n\n"
        "An inference service for long agent sessions on Kimi K3, on SGLang.\n\n"
        f"commands:\n{rows}\n\n"
        "examples:\n  longhaul serve\n  longhaul replay traces/ --concurrency 3\n\n"
        "'longhaul COMMAND --help' explains a command."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2 for a usage error, 130 after Ctrl-C).

    As the console script (no `argv`), SIGTERM ends it like an exception: what it started is ended too.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"longhaul {version('longhaul')}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        print(f"longhaul: no command named {name!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name].module)
    examples = getattr(module, "EXAMPLES", "")
    parser = argparse.ArgumentParser(
        prog=f"longhaul {name}",
        description=module.__doc__,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args(arguments[1:])))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
