"""The small K3 that is shipped with the project, and how it becomes a checkpoint directory."""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from pathlib import Path
from typing import Final

from model.state import state_directory
from model.vocabulary import TOKENIZER_SOURCES

SHIPPED: Final = Path(__file__).with_name("k3_small")
"""Weights, configuration and vocabulary; the tokenizer's code is that of this package."""

DRAFT: Final = Path(__file__).with_name("k3_small_draft")
"""Its draft for SGLang's DSPARK."""

PLACE: Final = Path("models", "k3-small")
"""Where the checkpoint lives in a state directory."""

_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def default_path() -> Path:
    """Where the checkpoint lives unless told otherwise: `models/k3-small` in the state directory."""
    return state_directory() / PLACE


def build(path: Path, source: Path = SHIPPED) -> Path:
    """Write the checkpoint to the directory `path`; where it stands already, leave it as it is.

    The directory appears complete or not at all: it is written beside `path` and renamed. An older version
    is replaced. Raises FileNotFoundError when the weights are not there.
    """
    weights = sorted(source.glob("model-*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{source} has no weights: train them with `longhaul model train`")
    files = [
        *weights,
        *(source / name for name in _FILES),
        *(Path(__file__).with_name(name) for name in TOKENIZER_SOURCES),
    ]
    if all((path / file.name).is_file() and filecmp.cmp(file, path / file.name, False) for file in files):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        staging.chmod(0o755)  # a temporary directory is private
        for file in files:
            shutil.copyfile(file, staging / file.name)
        if path.exists():
            shutil.rmtree(path)
        staging.rename(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path
