"""The small K3 that is shipped with the project, and how it becomes a checkpoint directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from model import tiny
from model.state import state_directory

SHIPPED: Final = Path(__file__).with_name("k3_small")
"""Weights, configuration and vocabulary; the tokenizer's code is that of this package."""

_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def default_path() -> Path:
    """Where the checkpoint lives unless told otherwise: `models/k3-small` in the state directory."""
    return state_directory() / "models" / "k3-small"


def build(path: Path, source: Path = SHIPPED) -> Path:
    """Write the checkpoint to the directory `path`, over an older one.

    Raises FileNotFoundError when the weights are not there.
    """
    weights = sorted(source.glob("model-*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{source} has no weights: train them with `longhaul model train`")
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("*.safetensors"):
        old.unlink()
    for file in (*weights, *(source / name for name in _FILES)):
        shutil.copyfile(file, path / file.name)
    for name in tiny.SOURCES:
        shutil.copyfile(Path(__file__).with_name(name), path / name)
    return path
