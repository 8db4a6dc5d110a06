"""Launch profiles: what they hold, what they refuse, and that SGLang's own parser takes them."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import arguments, hardware
from model.profile import Argument, EngineCommand, ProfileError, load_profile, profile_names
from service.cli import main

NAMES = ["b300-8", "cpu-tiny", "h200-2x8", "h200-slice"]
MODEL = Path("/models/k3")
MINIMAL = """
name = "mine"
summary = "a test"
device = "cpu"
[store]
timeout_s = 1.0
prefetch_threshold_tokens = 64
[[argument]]
flag = "--page-size"
value = 64
why = "a test"
"""


def full_command(name: str, *, store: bool = True, draft: bool = True) -> EngineCommand:
    profile = load_profile(name)
    return profile.command(
        MODEL,
        30000,
        store_url="redis://cache:6379/0" if store else None,
        draft=Path("/models/draft") if draft else None,
        extra=[word for entry in profile.required for word in (entry.flag, "0")],
    )


def value_of(command: EngineCommand, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_the_four_profiles_are_there() -> None:
    assert profile_names() == NAMES
    assert [load_profile(name).name for name in NAMES] == NAMES


@pytest.mark.sglang
def test_sglang_s_own_parser_takes_every_profile_and_names_what_it_refuses() -> None:
    # One process for all: importing the parser takes ten seconds. With the CPU plug-in it knows all backends.
    wrong = [
        *("--hicache-write-polcy", "write_through", "--page-size", "sixty", "--sleep-on-idle", "yes"),
        *("--tool-call-parser", "kimi_k4", "--zzzzzz"),
    ]
    commands = [full_command(name).argv[3:] for name in NAMES]
    results = arguments.check([*commands, wrong], load_profile("cpu-tiny").command(MODEL, 1).env)
    assert results[:-1] == [[], [], [], []]
    assert [(p.flag, p.value, p.nearest) for p in results[-1]] == [
        ("--hicache-write-polcy", "write_through", "--hicache-write-policy"),
        ("--page-size", "sixty", None),
        ("--sleep-on-idle", "yes", None),
        ("--tool-call-parser", "kimi_k4", "kimi_k3"),
        ("--zzzzzz", None, None),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_store_and_draft_arguments_come_only_when_asked_for(name: str) -> None:
    plain = full_command(name, store=False, draft=False)
    assert not [word for word in plain.argv if "hicache" in word or "hierarchical" in word]
    assert not [word for word in plain.argv if "speculative" in word or "DSPARK" in word]
    stored = full_command(name, draft=False)
    assert "--enable-hierarchical-cache" in stored.argv
    assert value_of(stored, "--hicache-storage-backend") == "dynamic"
    config = json.loads(value_of(stored, "--hicache-storage-backend-extra-config"))
    assert config["module_path"] == "cache_store.backend" and config["class_name"] == "RedisStore"
    assert config["interface_v1"] == 1 and config["url"] == "redis://cache:6379/0"
    assert config["timeout_s"] > 0 and config["prefetch_threshold"] >= 64
    drafted = full_command(name, store=False)
    assert value_of(drafted, "--speculative-algorithm") == "DSPARK"
    assert value_of(drafted, "--speculative-draft-model-path") == "/models/draft"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_gateway_counts_on_holds_in_every_profile(name: str) -> None:
    command = full_command(name)
    assert command.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert value_of(command, "--page-size") == "64"
    assert value_of(command, "--served-model-name") == "kimi-k3"
    assert value_of(command, "--host") == "127.0.0.1" and value_of(command, "--port") == "30000"
    assert "--incremental-streaming-output" in command.argv
    assert value_of(command, "--mamba-radix-cache-strategy") == "extra_buffer"


def test_an_extra_argument_replaces_the_profile_s() -> None:
    command = load_profile("cpu-tiny").command(MODEL, 1, extra=["--page-size=128", "--host", "0.0.0.0"])
    assert "--page-size" not in command.argv and command.argv[-3:] == ["--page-size=128", "--host", "0.0.0.0"]
    assert command.argv.count("--host") == 1 and value_of(command, "--host") == "0.0.0.0"


def test_a_two_node_profile_asks_for_what_differs_from_node_to_node() -> None:
    with pytest.raises(ProfileError, match=r"h200-2x8 needs --node-rank.*after '--'"):
        load_profile("h200-2x8").command(MODEL, 1, extra=["--dist-init-addr", "a:1"])


def test_the_printed_command_is_what_a_shell_would_run() -> None:
    command = full_command("cpu-tiny")
    words = shlex.split(command.shell().replace(" \\\n", " "))
    assert words[: len(command.env)] == [f"{name}={value}" for name, value in command.env.items()]
    assert words[len(command.env) :] == command.argv


@given(st.lists(st.text(min_size=1).filter(lambda word: not word.startswith("--")), max_size=5))
def test_any_value_survives_the_shell(values: list[str]) -> None:
    command = EngineCommand([sys.executable, "-m", "sglang.launch_server", "--x", *values], {"A": "b c"})
    assert shlex.split(command.shell().replace(" \\\n", " "))[1:] == command.argv


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_profile_of_one_s_own_is_read_from_its_path(tmp_path: Path) -> None:
    command = load_profile(write(tmp_path, MINIMAL)).command(MODEL, 1)
    assert value_of(command, "--page-size") == "64"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('why = "a test"', "", r"argument\[0\]\.why: Field required"),
        ('why = "a test"', 'why = ""', r"argument\[0\]\.why: .*at least 1 character"),
        ('flag = "--page-size"', 'flag = "page-size"', r"argument\[0\]\.flag"),
        ("value = 64", "value = true", r"argument\[0\]\.value"),
        ("value = 64", "vlaue = 64", r"argument\[0\]\.vlaue: Extra inputs"),
        (
            "value = 64",
            'value = 64\nwhen = "sometimes"',
            r"argument\[0\]\.when: .*'always', 'store' or 'draft'",
        ),
        ("timeout_s = 1.0", "timeout_s = 0", r"store\.timeout_s: .*greater than 0"),
        ('device = "cpu"', 'device = "tpu"', "device: "),
        ('device = "cpu"', 'device = "cuda"', "gpu and gpus"),
        ("value = 64", "value = ", "not valid TOML.*line 10"),
        ('flag = "--page-size"', 'flag = "--port"', "--port is set for every profile alike"),
    ],
)
def test_a_broken_profile_names_the_field(tmp_path: Path, before: str, after: str, said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        load_profile(write(tmp_path, MINIMAL.replace(before, after)))


def test_a_flag_given_twice_is_refused(tmp_path: Path) -> None:
    again = '[[argument]]\nflag = "--page-size"\nvalue = 32\nwhy = "a test"\n'
    with pytest.raises(ProfileError, match="--page-size is given twice"):
        load_profile(write(tmp_path, MINIMAL + again))


def test_an_unknown_profile_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no profile named 'b300'; there are b300-8, cpu-tiny"):
        load_profile("b300")
    with pytest.raises(ProfileError, match="No such file"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([], "cpu-tiny"),
        (["NVIDIA H200"], "h200-slice"),
        (["NVIDIA H200"] * 4, "h200-slice"),
        (["NVIDIA H200"] * 8, "h200-2x8"),
        (["NVIDIA B300 SXM6 AC"] * 8, "b300-8"),
    ],
)
def test_the_profile_follows_the_gpus(gpus: list[str], name: str) -> None:
    assert hardware.choose_profile(gpus) == name


def test_gpus_without_a_profile_say_what_to_do() -> None:
    with pytest.raises(ProfileError, match=r"no profile for 2 x NVIDIA L4.*--profile"):
        hardware.choose_profile(["NVIDIA L4"] * 2)


def test_gpus_are_what_the_driver_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_names() == []
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n")
    driver.chmod(0o755)
    assert hardware.gpu_names() == ["NVIDIA H200"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.gpu_names() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert hardware.gpu_names() == []


def test_a_passed_check_is_remembered_for_the_same_command_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def check(commands: list[list[str]], env: dict[str, str]) -> list[list[arguments.Problem]]:
        asked.append(list(commands[0]))
        return [[]]

    monkeypatch.setattr(arguments, "check", check)
    profile = load_profile("cpu-tiny")
    for path, port in ((MODEL, 1), (Path("/other"), 2)):
        arguments.verify("cpu-tiny", profile.command(path, port), memory=tmp_path)
    assert len(asked) == 1, "the checkpoint's path and the port are no reason to check again"
    arguments.verify("cpu-tiny", profile.command(MODEL, 1, extra=["--log-level", "debug"]), memory=tmp_path)
    assert len(asked) == 2


def test_a_refusal_names_profile_flag_and_nearest_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = arguments.Problem("--pagesize", "64", "there is no such flag", "--page-size")
    monkeypatch.setattr(arguments, "check", lambda *_: [[problem]])
    command = EngineCommand(["python", "-m", "sglang.launch_server", "--pagesize", "64"], {})
    with pytest.raises(
        ProfileError, match=r"(?s)profile mine: SGLang .*--pagesize 64.*did you mean --page-size\?"
    ):
        arguments.verify("mine", command, memory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_what_it_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path))
    monkeypatch.setattr("model.engine.verify", lambda *_, **__: None)
    options = ["engine", "--profile", "b300-8", "--model", "/models/k3", "--dry-run"]
    assert main([*options, "--json", "--", "--log-level", "debug"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["argv"][-2:] == ["--log-level", "debug"]
    assert {entry["name"] for entry in answer["reasons"]} >= {"--tp-size", "--model-path"}
    assert all(entry["why"] for entry in answer["reasons"])
    assert main(options) == 0
    assert shlex.split(capsys.readouterr().out.replace(" \\\n", " "))[:3] == answer["argv"][:3]


def test_the_command_says_which_profile_this_machine_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path))
    monkeypatch.setattr("model.engine.verify", lambda *_, **__: None)
    monkeypatch.setattr("model.engine.gpu_names", list)
    assert main(["engine", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "cpu-tiny (no CUDA device)" in captured.err
    assert str(tmp_path / "models" / "k3-small") in captured.out
    monkeypatch.setattr("model.engine.gpu_names", lambda: ["NVIDIA H200"])
    assert main(["engine"]) == 2
    assert "h200-slice needs --model" in capsys.readouterr().err


def test_the_engine_takes_the_place_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("model.engine.verify", lambda *_, **__: None)
    started: list[object] = []

    def execve(*call: object) -> None:
        started.extend(call)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        main(["engine", "--profile", "cpu-tiny", "--model", str(tmp_path), "--port", "31000"])
    program, argv, environment = started
    assert isinstance(argv, list) and isinstance(environment, dict)
    assert program == sys.executable and argv[argv.index("--port") + 1] == "31000"
    assert environment["SGLANG_PLATFORM"] == "longhaul_cpu" and environment["PATH"] == os.environ["PATH"]


def test_a_value_may_be_absent_one_or_several() -> None:
    assert Argument(flag="--sleep-on-idle", why="a test").tokens == ["--sleep-on-idle"]
    assert Argument(flag="--page-size", value=64, why="a test").tokens == ["--page-size", "64"]
    several = Argument(flag="--prefixes", value=("/a", "/b"), why="a test")
    assert several.tokens == ["--prefixes", "/a", "/b"]
