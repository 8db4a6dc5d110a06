"""What `longhaul serve` shows while things start."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from service.display import Display, last_line


def test_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert last_line(log) == ""
    log.write_text("")
    assert last_line(log) == ""
    log.write_bytes(b"one\n" * 5000 + "zwölf \n\n  \n".encode())
    assert last_line(log) == "zwölf"
    log.write_bytes(b"cut \xff\n")
    assert last_line(log) == "cut �"


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = SimpleNamespace(name="engine", log=tmp_path / "engine.log", pid=1)
    display = Display()
    display.starting(service)  # pyright: ignore[reportArgumentType]  # the three names that it reads
    for elapsed in range(5):
        display.waiting(service, elapsed)  # pyright: ignore[reportArgumentType]
    display.ready(service, 5)  # pyright: ignore[reportArgumentType]
    display.died(service, -9, 2.0, 1, 5)  # pyright: ignore[reportArgumentType]
    display.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[:2] == ["starting engine ...", "✓ engine 5.0 s"]
    assert "engine was ended by signal 9 (Killed): starting it again in 2 s (1 of 5)" in lines[2]
    assert len(lines) == 3, "no line is broken, however long"
