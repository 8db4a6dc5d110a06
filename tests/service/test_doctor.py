"""`longhaul doctor`: what it finds, what it says to do, and that it passes on this machine."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from service import doctor_engine, doctor_machine
from service.cli import main
from service.diagnosis import Check, CheckFailed, Finding, examine
from service.doctor_engine import OUTPUT_TOKENS, Answer, EngineTrial

MACHINE_CHECKS = ["python", "packages", "memory", "compiler", "profile", "hooks", "redis"]
ENGINE_CHECKS = ["tiny model", "engine boot", "greedy answer", "cached turn", "restart and restore"]


def nothing(_: object) -> None:
    pass


def failing() -> str:
    raise CheckFailed("no disk", "buy one")


def test_a_failure_stops_what_needs_it_and_nothing_else() -> None:
    def broken() -> str:
        raise ZeroDivisionError("odd")

    checks = [
        Check("first", lambda: "seen"),
        Check("second", failing, needs=("first",)),
        Check("third", lambda: "never", needs=("second",)),
        Check("fourth", broken),
        Check("fifth", lambda: "seen too", needs=("first",)),
    ]
    told: list[str] = []
    findings = examine(checks, lambda check: told.append(check.name), nothing)
    assert told == ["first", "second", "third", "fourth", "fifth"]
    assert [(f.ok, f.detail, f.remedy) for f in findings[:3]] == [
        (True, "seen", ""),
        (False, "no disk", "buy one"),
        (False, "not run", "mend 'second' first"),
    ]
    assert findings[3].detail == "ZeroDivisionError: odd" and not findings[3].ok and findings[3].remedy
    assert findings[4].ok


def run_check(name: str, folder: Path) -> str:
    return next(check for check in doctor_machine.machine_checks(folder) if check.name == name).examine()


def fault(name: str, folder: Path) -> CheckFailed:
    with pytest.raises(CheckFailed) as failure:
        run_check(name, folder)
    return failure.value


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler_it_names_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor_machine, "gpu_names", lambda: ["NVIDIA H200"])
    found = fault("compiler", tmp_path)
    assert "no C++ compiler" in found.detail and "apt install g++ libssl-dev" in found.remedy


def test_without_a_gpu_no_compiler_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_machine, "gpu_names", list)
    assert run_check("compiler", tmp_path) == "none is needed without a GPU"


def test_a_missing_header_is_found_by_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "c++", "echo 'probe.cpp:3:10: fatal error: openssl/sha.h: No such file' >&2; exit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(doctor_machine, "gpu_names", lambda: ["NVIDIA H200"])
    found = fault("compiler", tmp_path)
    assert "openssl/sha.h" in found.detail and "libssl-dev" in found.remedy


def test_a_compiler_that_builds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "c++", "echo 'g++ 14.2.0'")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(doctor_machine, "gpu_names", lambda: ["NVIDIA H200"])
    assert run_check("compiler", tmp_path) == "g++ 14.2.0"


def test_another_sglang_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"sglang": "0.5.22", "torch": "2.14.1"}.__getitem__)
    found = fault("packages", tmp_path)
    assert "0.5.22" in found.detail and "0.5.23" in found.detail and "make setup" in found.remedy


def test_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine.sys, "version_info", (3, 10, 4))
    assert "3.11 or 3.12" in fault("python", tmp_path).remedy


def test_too_little_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: 1 << 30)
    found = fault("memory", tmp_path)
    assert found.detail.startswith("1.0 GiB") and "4 GiB" in found.remedy


def test_no_redis_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("cache_store.servers.find_spec", lambda _: None)
    found = fault("redis", tmp_path)
    assert "no Redis server" in found.detail and "apt install valkey-server" in found.remedy


def test_gpus_without_a_profile_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.engine.gpu_names", lambda: ["NVIDIA L4"])
    found = fault("profile", tmp_path)
    assert "NVIDIA L4" in found.detail and "--profile" in found.remedy


class Forgetful:
    """Stands for a Redis client whose server loses a byte."""

    def __init__(self, *_: object) -> None:
        pass

    def set(self, *_: object) -> None:
        pass

    def setnx(self, *_: object) -> None:
        pass

    def get(self, _: str) -> bytes:
        return b"other"


def test_a_redis_that_gives_back_other_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_client", Forgetful)
    assert "other bytes" in fault("redis", tmp_path).detail


def test_hooks_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_HOOKS", "import sys; sys.exit('HookError: x.y.z has changed')")
    found = fault("hooks", tmp_path)
    assert found.detail == "HookError: x.y.z has changed" and "make setup" in found.remedy


def test_the_quick_checks_pass_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Loading SGLang to apply the hooks takes ten seconds: the whole run below does that.
    monkeypatch.setattr(doctor_machine, "_HOOKS", "print(1)")
    assert main(["doctor", "--skip-engine", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out.splitlines()[-1])
    assert answer["ok"] is True
    assert [entry["name"] for entry in answer["checks"]] == MACHINE_CHECKS
    for entry in answer["checks"]:
        assert set(entry) == {"name", "ok", "seconds", "detail", "remedy"} and entry["detail"]
    assert "checking hooks" in captured.err, "progress goes to standard error"


def test_a_failure_is_shown_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        "service.doctor.machine_checks",
        lambda _: [Check("disk", failing), Check("brackets", lambda: "a[red]b[/nothing]")],
    )
    assert main(["doctor", "--skip-engine"]) == 1
    shown = capsys.readouterr().out
    assert "no disk" in shown and "buy one" in shown and "a[red]b[/nothing]" in shown
    assert main(["doctor", "--skip-engine", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineTrial:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path / "state"))
    made = EngineTrial(tmp_path, SimpleNamespace())  # pyright: ignore[reportArgumentType]  # nothing is started
    (tmp_path / "engine-0.log").write_text("what the engine said")
    return made


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Makes the reference answer 0, 1, 2, ... with the given gaps."""

    def answers(gaps: list[float]) -> None:
        text = json.dumps({"tokens": list(range(OUTPUT_TOKENS)), "gaps": gaps})
        ran = subprocess.CompletedProcess([], 0, stdout=f"{text}\n", stderr="")
        monkeypatch.setattr(doctor_engine.subprocess, "run", lambda *_, **__: ran)

    return answers


def test_an_answer_is_compared_token_by_token(
    trial: EngineTrial, reference: Callable[[list[float]], None], tmp_path: Path
) -> None:
    compare: Any = trial._compare  # pyright: ignore[reportPrivateUsage]
    right = list(range(OUTPUT_TOKENS))
    wrong = [*right[:3], 99, *right[4:]]
    reference([1.0] * OUTPUT_TOKENS)
    assert compare([1], Answer(right, 0)) == ""
    with pytest.raises(CheckFailed, match=r"token 3 is 99, the reference says 3 \(by 1\.0000\)"):
        compare([1], Answer(wrong, 0))
    with pytest.raises(CheckFailed, match="5 tokens where the reference has 16") as failure:
        compare([1], Answer(right[:5], 0))
    kept = tmp_path / "state" / "logs" / "doctor-engine.log"
    assert str(kept) in failure.value.remedy and kept.read_text() == "what the engine said"
    reference([1.0, 1.0, 1.0, 0.0001, *[1.0] * (OUTPUT_TOKENS - 4)])
    assert "near-tie at token 3" in compare([1], Answer(wrong, 0))


def test_a_turn_that_came_from_no_cache_is_a_failure(
    trial: EngineTrial, reference: Callable[[list[float]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference([1.0] * OUTPUT_TOKENS)
    tokenizer = SimpleNamespace(encode_text=lambda _: [7] * 40)
    monkeypatch.setattr(doctor_engine, "K3Tokenizer", SimpleNamespace(load=lambda _: tokenizer))
    cached = 0
    monkeypatch.setattr(trial, "_generate", lambda _: Answer(list(range(OUTPUT_TOKENS)), cached))
    monkeypatch.setattr(trial, "_history", [5] * 400)
    turn: Any = trial._turn  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CheckFailed, match="0 of 400 known tokens came from storage, not 256 or more"):
        turn("storage", "look there")
    cached = 256
    assert turn("storage", "look there") == "256 of 400 known tokens from storage, answer equal"
    assert trial._history == [5] * 400 + [7] * 40 + list(range(OUTPUT_TOKENS))  # pyright: ignore[reportPrivateUsage]


def test_an_engine_that_does_not_answer_is_a_failure(trial: EngineTrial) -> None:
    with pytest.raises(CheckFailed, match="POST /generate: ConnectError"):
        trial._generate([1])  # pyright: ignore[reportPrivateUsage]


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_all_checks_pass_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path / "state"))
    before = set(psutil.Process().children())
    assert main(["doctor", "--json"]) == 0, capsys.readouterr()
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    findings = {entry["name"]: Finding(**entry) for entry in answer["checks"]}
    assert answer["ok"] and list(findings) == [*MACHINE_CHECKS, *ENGINE_CHECKS]
    assert "from the prefix cache" in findings["cached turn"].detail
    assert "known tokens from storage" in findings["restart and restore"].detail
    assert not (tmp_path / "state" / "redis").exists(), "a running service's data is not touched"
    assert set(psutil.Process().children()) <= before
