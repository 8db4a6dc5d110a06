"""SGLang general plug-in (entry point group ``sglang.srt.plugins``): the hooks of the CPU platform.

SGLang calls ``register`` in each of its processes. It does nothing unless ``SGLANG_PLATFORM`` selects the
platform.
"""

import os
import sys

from model.cpu.names import PLATFORM_NAME

HOOK_FAILURE_STATUS = 3


def register() -> None:
    """Put the hooks in place, or end the process with status 3 and one message that names the hook."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return
    from model.cpu.hooks import apply_hooks, this_process
    from model.cpu.registry import HookError

    try:
        apply_hooks(this_process())
    except HookError as error:
        sys.stderr.write(f"longhaul: {error}\n")
        # SGLang's loader swallows every Exception; SystemExit isn't one.
        raise SystemExit(HOOK_FAILURE_STATUS) from error
