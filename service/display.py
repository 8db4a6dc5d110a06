"""What `longhaul serve` shows on a terminal: what is starting and for how long, then what happens to it."""

import time
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from service.processes import Service
from service.supervisor import describe

_LINE_WIDTH = 70


def last_line(log: Path, limit_bytes: int = 4096) -> str:
    """The last line of a log that says something; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - limit_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Display:
    """Observer of a `Supervisor` on standard error: a spinner while something starts, then a line."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._what = ""

    def busy(self, what: str, elapsed_s: float, detail: str = "") -> None:
        """Show what is going on, in place of what was shown before; once only where there is no terminal."""
        if not self.console.is_terminal:
            if what != self._what:
                self.console.print(f"{what} ...", soft_wrap=True)
            self._what = what
            return
        text = Text.assemble(f"{what} ", (f"{elapsed_s:.0f} s  ", "cyan"), (detail[-_LINE_WIDTH:], "dim"))
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def done(self, what: str, elapsed_s: float) -> None:
        """Replace the spinner by a line that stays."""
        self._clear()
        self._print(Text.assemble(("✓ ", "green"), f"{what} ", (f"{elapsed_s:.1f} s", "dim")))

    def note(self, message: str, style: str = "") -> None:
        """Print a line with the time of day."""
        self._clear()
        self._print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), (message, style)))

    def starting(self, service: Service) -> None:
        """A service was launched."""
        self.busy(f"starting {service.name}", 0.0)

    def waiting(self, service: Service, elapsed_s: float) -> None:
        """A service is on its way: show the last line of its log."""
        self.busy(f"starting {service.name}", elapsed_s, last_line(service.log))

    def ready(self, service: Service, elapsed_s: float) -> None:
        """A service does its work."""
        self.done(service.name, elapsed_s)

    def died(self, service: Service, status: int, delay_s: float, deaths: int, limit: int) -> None:
        """A service ended by itself."""
        self.note(
            f"{service.name} {describe(status)}: starting it again in {delay_s:.0f} s "
            f"({deaths} of {limit}); its log: {service.log}",
            "yellow",
        )

    def stopping(self, service: Service) -> None:
        """A service is being stopped."""
        self.busy(f"stopping {service.name}", 0.0)

    def close(self) -> None:
        """Take the spinner away."""
        self._clear()

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
