"""The shipped K3: it becomes a checkpoint, and it calls a tool."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from model import small
from model.encoding import conversation_segments
from model.reference import ReferenceModel
from model.tasks.environment import Tool
from model.tokenizer import K3Tokenizer
from service.cli import main

HARBOR = Tool("get_harbor", "Look up a harbor: temperature, depth.", {"name": "which harbor"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.build(tmp_path_factory.mktemp("models") / "k3-small")


def test_what_is_shipped_is_what_was_packed() -> None:
    manifest = json.loads((small.SHIPPED / "longhaul.json").read_text())
    assert sum(name.startswith("model-") for name in manifest["files"]) == 3
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((small.SHIPPED / name).read_bytes()).hexdigest() == digest, name


def test_a_checkpoint_that_stands_is_left_and_an_older_one_replaced(tmp_path: Path) -> None:
    path = small.build(tmp_path / "models" / "k3-small")
    weights = path / "model-00001-of-00003.safetensors"
    first = weights.stat().st_ino
    assert small.build(path) == path and weights.stat().st_ino == first
    (path / "encoding.py").write_text("of an earlier version")
    (path / "model-00001-of-00009.safetensors").write_text("of an earlier version")
    small.build(path)
    assert weights.stat().st_ino != first
    assert not (path / "model-00001-of-00009.safetensors").exists()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_no_weights_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="longhaul model train"):
        small.build(tmp_path / "models", tmp_path)


def unchecked(*_: object, **__: object) -> None:
    """Stands for the check of SGLang's arguments, which takes seconds."""


def test_the_engine_serves_it_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_STATE", str(tmp_path))
    monkeypatch.setattr("model.engine.verify", unchecked)
    monkeypatch.setattr("model.engine.gpu_names", list)
    started: list[list[str]] = []

    def execve(_program: str, argv: list[str], _environment: object) -> None:
        started.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        main(["engine"])
    path = Path(started[0][started[0].index("--model-path") + 1])
    assert path == tmp_path / "models" / "k3-small" and (path / "config.json").is_file()


def test_it_calls_a_tool(checkpoint: Path) -> None:
    tokenizer = K3Tokenizer.load(checkpoint)
    question = {"role": "user", "content": "What is the depth of harbor Oslo?"}
    ids = tokenizer.encode_segments(conversation_segments([question], [HARBOR.declaration()]))
    written = tokenizer.decode([step.token for step in ReferenceModel.load(checkpoint).greedy(ids, 90)])
    assert 'call tool="get_harbor"' in written and 'argument key="name" type="string"<|sep|>Oslo<' in written


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "build", "--small", "--output", str(tmp_path / "k3"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["path"] == str(tmp_path / "k3") and made["parameters"] == 17_330_248
    assert K3Tokenizer.load(tmp_path / "k3").vocab_size == 4096
    assert main(["model", "build", "--small", "--seed", "1"]) == 2
    assert "--seed" in capsys.readouterr().err
