"""A target and its draft, loaded for measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file

from model.tokenizer import K3Tokenizer
from model.training.network import Network
from model.training.weights import load
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
            network = load(target, dtype)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DraftError(f"{target}: not a K3 of `longhaul model train` ({error!r})") from error
        config = DraftConfig.read(draft)
        sizes = network.geometry
        if (config.hidden_size, config.vocab_size) != (sizes.hidden_size, sizes.vocab_size):
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
