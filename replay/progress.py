"""The progress of a replay, on stderr."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replay.record import Record


class ReplayProgress:
    """Turns done, tokens and the hit rate so far; a context manager."""

    def __init__(self, turns: int | None, console: Console) -> None:
        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "turns  {task.fields[tokens]:,} tokens  hit {task.fields[hit]}  {task.fields[errors]}"
            ),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("replay", total=turns, tokens=0, hit="-", errors="")
        self._tokens = self._cached = self._errors = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, record: Record) -> None:
        """Count one request."""
        if record.answer is None:
            self._errors += 1
        else:
            self._tokens += record.answer.usage.prompt_tokens
            self._cached += record.answer.usage.cached_tokens or 0
        self._progress.update(
            self._task,
            advance=1,
            tokens=self._tokens,
            hit=f"{self._cached / self._tokens:.3f}" if self._tokens else "-",
            errors=f"{self._errors} errors" if self._errors else "",
        )
