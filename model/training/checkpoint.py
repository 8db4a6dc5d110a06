"""Writes a trained network's checkpoint, all but the tokenizer's code."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import tiny
from model.training.geometry import VOCAB_SIZE
from model.training.network import Network
from model.training.weights import to_checkpoint
from model.vocabulary import special_ids, tokenizer_config

SHARD_BYTES: Final = 14 << 20
_FLOAT32: Final = ("A_log", "dt_bias", "e_score_correction_bias")


def rounded(network: Network) -> dict[str, Tensor]:
    """The checkpoint's tensors in bfloat16; decays and router corrections stay float32."""
    return {
        name: tensor if name.endswith(_FLOAT32) else tensor.bfloat16()
        for name, tensor in to_checkpoint(network).items()
    }


def shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, cut into files of at most `SHARD_BYTES`."""
    files: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if held + size > SHARD_BYTES and files[-1]:
            files.append({})
            held = 0
        files[-1][name] = tensor.contiguous()
        held += size
    return files


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer_json: str) -> None:
    """Write the directory; what it held of an earlier checkpoint is replaced."""
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("model-*.safetensors"):
        old.unlink()
    files = shards(tensors)
    index: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(part, path / name, metadata={"format": "pt"})
        (path / name).chmod(0o644)
        index |= dict.fromkeys(part, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )
    describe(path, config, tokenizer_json)


def describe(path: Path, config: Mapping[str, Any], tokenizer_json: str) -> None:
    """Write all but the weights and the tokenizer's code, which `model.small` adds."""
    ids = special_ids(VOCAB_SIZE)
    tokens = {f"{role}_token_id": ids[text] for role, text in tiny.TOKEN_ROLES.items()}
    _write_json(path / "config.json", config)
    # Sampled, so small a model misspells now and then what it copies: greedy, for clients that say nothing.
    _write_json(path / "generation_config.json", {**tokens, "temperature": 0})
    _write_json(path / "tokenizer_config.json", tokenizer_config())
    (path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parameters(tensors: Mapping[str, Tensor]) -> int:
    """How many numbers the tensors hold."""
    return sum(torch.Size(tensor.shape).numel() for tensor in tensors.values())
