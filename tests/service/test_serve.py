"""`longhaul serve`: what it refuses before it starts anything, and the whole of it for real."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cache_store.lock import DirectoryLock
from model import arguments, small
from service import serve, stack
from service.cli import main
from service.processes import HttpService


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options with which `serve` would start, on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ports = ["--port", str(free_port()), "--engine-port", str(free_port())]
    return ["serve", *ports, "--state-dir", str(tmp_path / "state")]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--no-store", "--store-url", "redis://h:1/0"], "--no-store and --store-url contradict"),
        (["--store-memory", "0"], "--store-memory 0.0: give a positive number"),
        (["--tenants", "/no/such.toml"], "--tenants /no/such.toml: there is no such file"),
        (["--draft", "/no/such"], "--draft /no/such: there is no such file"),
        (["--profile", "b300"], "no profile named 'b300'"),
        (["--profile", "b300-8"], "b300-8 needs --model"),
        (["--model", "/no/such"], "no checkpoint in /no/such"),
        (["--profile", "h200-slice", "--model", str(small.SHIPPED)], "longhaul model pad --model"),
        (["--port", "99999"], "--port 99999 is not a port"),
        (["--replicas", "0"], "--replicas 0: give a number from 1 on"),
        (["--replicas", "2", "--port", "18001", "--engine-port", "18000"], "one of the engines' ports"),
        (["--host", "192.0.2.1"], "192.0.2.1 can't be used"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_said_before_anything_starts(
    options: list[str], more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("more", "draft"),
    [
        ([], small.DRAFT),
        (["--draft", "none"], None),
        (["--draft", "/a/draft"], Path("/a/draft")),
        (["--model", "/a/model"], None),
        (["--model", "/a/model", "--draft", "/a/draft"], Path("/a/draft")),
    ],
)
def test_the_small_model_is_served_with_its_draft(more: list[str], draft: Path | None) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert serve.draft_path(parser.parse_args(more)) == draft


@pytest.mark.parametrize("option", ["--port", "--engine-port"])
def test_a_port_in_use_is_named_with_its_option(
    options: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([*options, option, port]) == 2
    error = capsys.readouterr().err
    assert f"port {port}" in error and f"with {option}" in error


def test_one_port_for_two_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options, "--port", "18000", "--engine-port", "18000"]) == 2
    assert "both 18000" in capsys.readouterr().err


def test_a_state_directory_in_use_is_refused_before_its_logs_are_touched(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    log = state / "logs" / "redis-ledger.log"
    log.parent.mkdir(parents=True)
    log.write_text("of the one that runs")
    lock = DirectoryLock(state)
    lock.acquire()
    assert main(options) == 2
    assert f"{state} is in use by process {os.getpid()}" in capsys.readouterr().err
    assert log.read_text() == "of the one that runs" and not log.with_name("redis-ledger.log.1").exists()
    lock.release()


def test_an_argument_that_sglang_does_not_know_is_named(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    asked: list[list[str]] = []

    def check(commands: list[list[str]], _: object) -> list[list[arguments.Problem]]:
        asked.extend(commands)
        return [[arguments.Problem("--page-sise", "64", "there is no such flag", "--page-size")]]

    monkeypatch.setattr(arguments, "check", check)
    before = set(psutil.Process().children())
    assert main([*options, "--model", str(model), "--no-store", "--", "--page-sise", "64"]) == 1
    assert asked[0][-2:] == ["--page-sise", "64"] and "--hicache-size" not in asked[0]
    error = capsys.readouterr().err
    assert "cpu-tiny" in error and "--page-sise 64" in error and "did you mean --page-size?" in error
    assert set(psutil.Process().children()) <= before, "the ledger that was up by then is stopped"


def test_an_engine_that_ends_at_once_shows_the_end_of_its_log(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def broken_engine(_command: object, port: int, log: Path, name: str) -> HttpService:
        program = [sys.executable, "-c", "print('no weights there', flush=True); raise SystemExit(7)"]
        url = f"http://127.0.0.1:{port}/health"
        return HttpService(name, program, env={}, health_url=url, log=log, grace_s=1)

    monkeypatch.setattr("service.serve.verify", lambda *_, **__: None)
    monkeypatch.setattr("service.serve.engine_service", broken_engine)
    before = set(psutil.Process().children())
    assert main([*options, "--model", str(model), "--no-store"]) == 1
    error = capsys.readouterr().err
    assert "engine ended with status 7" in error and "no weights there" in error
    assert str(tmp_path / "state" / "logs" / "engine.log") in error.replace("\n", "")
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    ("host", "url_host"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("box", "box")],
)
def test_a_wildcard_is_reached_through_the_loopback(host: str, url_host: str) -> None:
    assert stack.reachable(host) == url_host


def test_the_blob_store_takes_a_share_of_what_the_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(stack, "_CGROUP_LIMITS", (limit,))
    machine = psutil.virtual_memory().total
    assert stack.memory_bytes() == machine
    limit.write_text("max\n")
    assert stack.memory_bytes() == machine
    limit.write_text(f"{4 << 30}\n")
    assert stack.default_blob_bytes() == 512 << 20
    limit.write_text(f"{1 << 30}\n")
    assert stack.default_blob_bytes() == 256 << 20


@contextlib.contextmanager
def serving(state: Path, *more: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A real `longhaul serve` that is ready, and what it says about itself."""
    ports = ["--port", str(free_port()), "--engine-port", str(free_port())]
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "serve",
        "--state-dir",
        str(state),
        "--json",
        *ports,
        *more,
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"serve ended with {process.wait()} before it was ready"
            yield process, json.loads(line)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(120)


def chat(url: str, content: str) -> dict[str, Any]:
    body = {
        "model": "kimi-k3",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def left(processes: list[psutil.Process], limit_s: float = 10.0) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return alive


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_whole_service_serves_survives_its_engine_and_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state) as (process, about):
        first = chat(about["url"], "Hello")
        assert first["usage"]["completion_tokens"] == 8
        assert httpx.get(f"{about['url']}/health", timeout=10).status_code == 200

        # A second one on the same state directory, on ports of its own, is refused and disturbs nothing.
        ports = ["--port", str(free_port()), "--engine-port", str(free_port())]
        second = subprocess.run(
            [sys.executable, "-m", "service.cli", "serve", "--state-dir", str(state), *ports],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
        assert second.returncode == 2
        assert f"in use by process {process.pid}" in second.stderr and "--state-dir" in second.stderr

        # A killed engine comes back by itself, with the same answer.
        engine = psutil.Process(about["pids"]["engine"])
        scheduler = engine.children(recursive=True)
        assert scheduler
        engine.kill()
        assert not left(scheduler, 30), "the engine's own children go with it"
        end = time.monotonic() + 300
        while httpx.get(f"{about['url']}/ready", timeout=30).status_code != 200:
            assert time.monotonic() < end, (state / "logs" / "engine.log").read_text()[-3000:]
            time.sleep(1)
        again = chat(about["url"], "Hello")
        assert again["choices"][0]["message"] == first["choices"][0]["message"]

        processes = family(process)
        assert len(processes) >= 6
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0
    assert not left(processes)
    for url in (about["url"], about["engine_url"]):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, timeout=5)
    assert not list(state.rglob("*.sock"))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_kill_9_of_the_supervisor_leaves_nothing_even_while_the_engine_starts(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "service.cli", "serve", "--state-dir", str(state), "--no-store"]
    command += ["--port", str(free_port()), "--engine-port", str(free_port())]
    with subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as process:
        try:
            end = time.monotonic() + 400
            # The launcher has spawned what will be the scheduler, which is still importing.
            while spawned_by_the_launcher(process) < 2:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
            assert "sglang::scheduler" not in " ".join(names(process)), "too late to be what this is about"
            processes = family(process)
        finally:
            process.kill()
    assert not left(processes, 15)


def names(process: "subprocess.Popen[str]") -> list[str]:
    return [" ".join(words) for child in family(process) if (words := words_of(child))]


def words_of(process: psutil.Process) -> list[str]:
    """The command line; empty for a process that has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def spawned_by_the_launcher(process: "subprocess.Popen[str]") -> int:
    for child in family(process):
        if "sglang.launch_server" in words_of(child):
            return len(child.children())
    return 0
