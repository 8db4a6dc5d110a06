"""Ends process groups when the process that feeds its standard input is gone, however it went.

    python -I -S guardian.py

Each line adds a group (`+PGID GRACE_S`) or takes one away (`-PGID`). At the end of the input every group
that is left gets its grace and then SIGKILL. The kernel's own signal (`cache_store.tether`) reaches only the
leader of a group; this reaches what the leader had started, also while it was still starting it.
"""

import os
import signal
import sys
import time
from contextlib import suppress


def main() -> int:
    """Read until the end of the input, then end what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: dict[int, float] = {}
    for line in sys.stdin:
        words = line[1:].split()
        if line.startswith("+"):
            groups[int(words[0])] = float(words[1])
        else:
            groups.pop(int(words[0]), None)
    start = time.monotonic()
    for group, grace_s in sorted(groups.items(), key=lambda item: item[1]):
        while _is_alive(group) and time.monotonic() < start + grace_s:
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return 0


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
