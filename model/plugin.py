"""SGLang general plug-in (entry point group ``sglang.srt.plugins``): the hooks of the CPU platform.

SGLang calls ``register`` in each of its processes. Unless ``SGLANG_PLATFORM`` selects the platform or
``LONGHAUL_TEXT_ONLY`` is set, it changes nothing but how grammars are compiled.
"""

import os
import sys

from model import grammar, text_only
from model.cpu.names import PLATFORM_NAME
from model.cpu.registry import HookError

HOOK_FAILURE_STATUS = 3


def register() -> None:
    """Put the hooks in place, or end the process with status 3 and one message that names the hook."""
    try:
        if "sglang" in sys.modules:  # else it isn't SGLang that asks, and there is nothing to change
            grammar.register()
        if text_only.is_asked_for():
            text_only.apply()
        if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
            from model.cpu.hooks import apply_hooks, this_process

            apply_hooks(this_process())
    except HookError as error:
        sys.stderr.write(f"longhaul: {error}\n")
        # SGLang's loader swallows every Exception; SystemExit isn't one.
        raise SystemExit(HOOK_FAILURE_STATUS) from error
