"""A target and its draft, loaded for measurements."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file

from model.tokenizer import K3Tokenizer
from model.training.geometry import Geometry
from model.training.network import Network
from model.training.weights import from_checkpoint, read
from speculative.decoding import narrow
from speculative.draft import DraftConfig, DraftError
from speculative.network import DraftNetwork


@dataclass(frozen=True, slots=True)
class Pair:
    """Networks without gradients."""

    target: Network
    draft: DraftNetwork
    tokenizer: K3Tokenizer

    @classmethod
    def load(cls, target: Path, draft: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Self:
        """Load two checkpoint directories; products run in `dtype`. Raises `DraftError`."""
        try:
            geometry = Geometry.of(json.loads((target / "config.json").read_text(encoding="utf-8")))
            network = Network(geometry, dtype)
            from_checkpoint(network, read(target))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DraftError(f"{target}: not a K3 of `longhaul model train` ({error!r})") from error
        config = DraftConfig.read(draft)
        if (config.hidden_size, config.vocab_size) != (geometry.hidden_size, geometry.vocab_size):
            raise DraftError(f"{draft}: made for another target than {target}; train one for it")
        drafter = DraftNetwork(config)
        try:
            weights = load_file(draft / "model.safetensors")
            drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        except (OSError, RuntimeError) as error:
            raise DraftError(f"{draft}: no weights of a DSpark draft ({error})") from error
        network.requires_grad_(False).to(device)
        narrow(network)
        drafter.requires_grad_(False).to(device, dtype)
        return cls(network, drafter, K3Tokenizer.load(target))
