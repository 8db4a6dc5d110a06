"""Becomes another program after asking the kernel for a signal when the parent dies (prctl(2)).

    python -I -S tether.py SIGNAL PARENT_PID PROGRAM [ARGUMENT ...]

A program of its own because code between fork and exec is not safe in a process that has threads. The request
outlives the exec.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: the process is the other program afterwards."""
    death_signal, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
    # The parent may have died before the line above: then no signal will come.
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: {error.strerror}")


if __name__ == "__main__":
    main()
