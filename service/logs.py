"""The services' log files: one kept from the run before, and followed on the terminal with --verbose."""

from collections.abc import Callable
from pathlib import Path


def rotate(log: Path) -> None:
    """Put the log of the run before aside as `NAME.1`, in place of an older one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))


class Follower:
    """Reads what was added to log files since it looked last, whole lines only."""

    def __init__(self, logs: dict[str, Path]) -> None:
        """`logs` maps the name that stands before each line to the file."""
        self._logs = logs
        self._offsets = dict.fromkeys(logs, 0)

    def read(self, show: Callable[[str, str], None]) -> None:
        """Call `show(name, line)` for every new line."""
        for name, log in self._logs.items():
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(self._offsets[name])
                added = file.read()
            complete = added[: added.rfind(b"\n") + 1]
            self._offsets[name] += len(complete)
            for line in complete.decode(errors="replace").splitlines():
                show(name, line)
