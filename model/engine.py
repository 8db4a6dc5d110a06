"""Run SGLang with a launch profile, in place of this process, or print the command.

The profile is chosen by the GPUs of this machine (none: the small K3 on the CPU) unless one is named. What
follows `--` goes to SGLang as it is and replaces the profile's own argument of the same name.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from model import small
from model.arguments import is_sglang_installed, verify
from model.hardware import CPU_PROFILE, choose_profile, gpu_names
from model.profile import (
    DEFAULT_PORT,
    EngineCommand,
    Profile,
    ProfileError,
    Variable,
    load_profile,
    profile_names,
)
from model.state import state_directory

EXAMPLES = """\
  longhaul engine --dry-run
  longhaul engine --profile b300-8 --model /models/Kimi-K3 --store-url redis://cache:6379/0
  longhaul engine --profile h200-2x8 --model /models/Kimi-K3 -- --node-rank 0 --dist-init-addr 10.0.0.1:5000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longhaul engine`."""
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"a launch profile ({', '.join(profile_names())}) or a .toml file; default: by the GPUs here",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="the checkpoint; default: the small K3 that is shipped, on the CPU",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    parser.add_argument(
        "--store-url",
        metavar="URL",
        help="Redis for KV pages and states (redis://host:port/0, unix:///path); default: none",
    )
    parser.add_argument("--draft", type=Path, metavar="PATH", help="a DSpark checkpoint to speculate with")
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument("--explain", action="store_true", help="with --dry-run: why each argument is there")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print one JSON object")
    parser.add_argument("extra", nargs="*", metavar="-- ARGUMENT ...", help="further arguments for SGLang")


def select_profile(name: str | None) -> tuple[Profile, str]:
    """The named profile, or the one for this machine, and how it was chosen; raises `ProfileError`."""
    if name is not None:
        return load_profile(name), "named"
    gpus = gpu_names()
    found = f"{len(gpus)} x {gpus[0]}" if gpus else "no CUDA device"
    return load_profile(choose_profile(gpus)), found


def checkpoint(profile: Profile, given: Path | None, state: Path) -> Path:
    """The checkpoint to serve, as an absolute path. On a CPU, when none is given, that is where the small K3
    belongs, and `small.build` has to put it there. Raises `ProfileError` when there is none."""
    if given is None and profile.name != CPU_PROFILE:
        raise ProfileError(
            f"profile {profile.name} needs --model, the directory of a checkpoint "
            f"(or pass --profile {CPU_PROFILE} for the small model on the CPU)"
        )
    if given is None:
        return state / small.PLACE
    path = given.expanduser().absolute()
    if not (path / "config.json").is_file():
        raise ProfileError(
            f"no checkpoint in {path} (config.json is missing): give --model a checkpoint's directory"
        )
    return path


def run(args: argparse.Namespace) -> int:
    """Replace this process by the engine; returns only after --dry-run (0) or for an error (2)."""
    notes = Console(stderr=True, highlight=False)
    try:
        profile, found = select_profile(args.profile)
        notes.print(f"profile {profile.name} ({found}): {profile.summary}", soft_wrap=True)
        state = state_directory()
        if args.dry_run:
            model: Path = args.model or state / small.PLACE
        else:
            model = checkpoint(profile, args.model, state)
            if args.model is None:
                small.build(model)
        command = profile.command(
            model, args.port, store_url=args.store_url, draft=args.draft, extra=args.extra
        )
        if is_sglang_installed():
            verify(profile.name, command, memory=state / "checked")
        elif args.dry_run:
            notes.print("not checked: SGLang is not installed here", style="yellow")
        else:
            raise ProfileError("SGLang is not installed here: run `make setup`, or use the engine's image")
    except (ProfileError, OSError) as error:
        print(f"longhaul engine: {error}", file=sys.stderr)
        return 2
    if not args.dry_run:
        os.execve(command.argv[0], command.argv, command.environment(os.environ))
    _show(profile, command, as_json=args.json, explain=args.explain)
    return 0


def _show(profile: Profile, command: EngineCommand, *, as_json: bool, explain: bool) -> None:
    if as_json:
        reasons = [
            {
                "name": entry.name if isinstance(entry, Variable) else entry.flag,
                "value": entry.value,
                "why": entry.why,
            }
            for entry in command.reasons
        ]
        answer = {
            "profile": profile.name,
            "argv": command.argv,
            "env": command.env,
            "shell": command.shell(),
            "reasons": reasons,
        }
        print(json.dumps(answer))
        return
    if not explain:
        print(command.shell())
        return
    table = Table("argument", "value", "why", title=f"{profile.name}: {profile.summary}")
    for entry in command.reasons:
        name = entry.name if isinstance(entry, Variable) else entry.flag
        value = " ".join(entry.value) if isinstance(entry.value, tuple) else str(entry.value or "")
        table.add_row(name, value, entry.why)
    Console().print(table)
