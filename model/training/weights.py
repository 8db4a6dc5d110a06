"""From the trainer's parameters, with experts stacked, to the checkpoint's tensors and back."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.training.geometry import Geometry
from model.training.network import Network

_PREFIX = "language_model."
_MOE = "block_sparse_moe."
_STACKED = ("w1", "w2", "w3")


def to_checkpoint(network: Network) -> dict[str, Tensor]:
    """Float32 tensors under the checkpoint's names."""
    tensors: dict[str, Tensor] = {}
    for name, weight in network.named_parameters():
        at, _, last = name.rpartition(".")
        if last in _STACKED:
            for expert, matrix in enumerate(weight.detach()):
                tensors[f"{_PREFIX}{at}.experts.{expert}.{last}.weight"] = matrix.float().cpu().clone()
        else:
            tensors[_PREFIX + name] = weight.detach().float().cpu().clone()
    return tensors


@torch.no_grad()
def from_checkpoint(network: Network, tensors: Mapping[str, Tensor]) -> None:
    """Load what `to_checkpoint` gave. Raises KeyError for a tensor that is missing."""
    for name, weight in network.named_parameters():
        at, _, last = name.rpartition(".")
        if last in _STACKED:
            parts = [tensors[f"{_PREFIX}{at}.experts.{n}.{last}.weight"] for n in range(len(weight))]
            weight.copy_(torch.stack(parts))
        else:
            weight.copy_(tensors[_PREFIX + name])


def load(path: Path, dtype: torch.dtype = torch.float32) -> Network:
    """The network of a checkpoint directory, products in `dtype`.

    Raises OSError (FileNotFoundError without tensors), ValueError, KeyError for what is missing.
    """
    geometry = Geometry.of(json.loads((path / "config.json").read_text(encoding="utf-8")))
    network = Network(geometry, dtype)
    from_checkpoint(network, read(path))
    return network


def read(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint directory. Raises FileNotFoundError when it holds none."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise FileNotFoundError(f"{path} has no *.safetensors: give a checkpoint's directory")
    return tensors
