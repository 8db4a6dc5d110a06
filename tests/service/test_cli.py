"""The `longhaul` script: one table of commands."""

import importlib
import subprocess
import sys

import pytest

from service.cli import COMMANDS, main


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown and command.summary in shown
    assert main([]) == 2


def test_an_unknown_command_says_which_is_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    error = capsys.readouterr().err
    assert "no command named 'serv'" in error and "did you mean 'serve'?" in error
    assert main(["xyzzy"]) == 2
    error = capsys.readouterr().err
    assert "did you mean" not in error and "serve, gateway" in error


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "longhaul 0.1.0\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_keeps_the_contract(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[name].module)
    assert module.__doc__ and module.EXAMPLES.lstrip().startswith(f"longhaul {name}")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: longhaul {name}" in shown and "examples:" in shown


@pytest.mark.parametrize("name", ["serve", "gateway", "engine", "doctor", "replay"])
def test_help_needs_no_torch(name: str) -> None:
    # The gateway's image has neither, and nobody waits ten seconds for a help text.
    program = (
        "import sys\n"
        "from service.cli import main\n"
        "try:\n"
        f"    main([{name!r}, '--help'])\n"
        "finally:\n"
        "    loaded = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("service.serve.run", interrupted)
    assert main(["serve"]) == 130
