"""Lets SGLang serve a K3 checkpoint that has no media processor.

SGLang decides by the architecture's name that K3 takes images, and then needs the processor's files; its
`--language-model-only` refuses K3. The CPU platform switches media off for itself; a profile for a GPU sets
LONGHAUL_TEXT_ONLY=1.
"""

import argparse
import inspect
import os
from typing import Any

from model.cpu.registry import HookError

VARIABLE = "LONGHAUL_TEXT_ONLY"
_EXPECTED = "(args: 'argparse.Namespace')"


def is_asked_for() -> bool:
    """Whether the environment says that only text is served."""
    return os.environ.get(VARIABLE) == "1"


def apply() -> None:
    """Switch media off in the arguments that SGLang parses from now on; raises `HookError`."""
    from sglang.srt.server_args import ServerArgs

    parse: Any = ServerArgs.from_cli_args
    found = str(inspect.signature(parse))
    if found != _EXPECTED:
        raise HookError(f"ServerArgs.from_cli_args takes {found}, not {_EXPECTED}: this SGLang isn't known")

    def from_cli_args(_cls: type, args: argparse.Namespace) -> Any:
        server_args = parse(args)
        server_args.enable_multimodal = False
        return server_args

    ServerArgs.from_cli_args = classmethod(from_cli_args)  # pyright: ignore[reportAttributeAccessIssue]
