"""A DSpark draft checkpoint as SGLang's `DSparkDraftModel` loads it, with random or fitted weights.

DSpark (arXiv 2607.05147): a few Qwen3 layers read projected hidden states of the target as context, propose
a block of tokens in parallel, and a low-rank Markov head adds what the previous token says about the next.
Embedding and output head are the target's.

An untrained draft proposes noise, as tests of exactness need it: nearly every proposal is rejected and
rolled back. `successors` writes a table of likely next tokens into the Markov head, so that runs of proposals
are accepted as well.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import small

SHIPPED: Final = small.DRAFT
"""The draft of the small K3."""
NORM_EPS: Final = 1e-6
_SUCCESSOR_GAIN: Final = 40.0


class DraftError(Exception):
    """A target that can't be drafted for; the message says why and what to give instead."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Sizes of a draft. `target_layers` count from 0: after them the target's stream is captured."""

    hidden_size: int
    vocab_size: int
    target_depth: int
    target_layers: tuple[int, ...]
    mask_token: int
    max_positions: int
    block_size: int = 7
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    markov_rank: int = 256
    rope_theta: float = 10000.0
    dtype: str = "float32"
    """In which the weights are stored."""

    def __post_init__(self) -> None:
        assert self.block_size > 0 and self.heads % self.kv_heads == 0
        assert self.target_layers and all(0 <= layer < self.target_depth for layer in self.target_layers)

    @classmethod
    def of(cls, target: Path, **sizes: Any) -> Self:
        """The configuration for a target's checkpoint directory; `sizes` override fields.

        Raises `DraftError` for a directory without a K3 configuration.
        """
        try:
            text: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))[
                "text_config"
            ]
            depth: int = text["num_hidden_layers"]
            hidden: int = text["hidden_size"]
            given: dict[str, Any] = {
                "hidden_size": hidden,
                "vocab_size": text["vocab_size"],
                "target_depth": depth,
                # Early, middle and late; the last layer's own stream is what the target itself predicts from.
                "target_layers": tuple(sorted({1, depth // 2, depth - 2} & set(range(depth))))
                or (depth - 1,),
                "mask_token": text["pad_token_id"],
                "max_positions": text["max_position_embeddings"],
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DraftError(
                f"{target}: no configuration of a Kimi K3 ({error!r}); give a checkpoint"
            ) from error
        return cls(**{**given, **sizes})

    @classmethod
    def read(cls, path: Path) -> Self:
        """The configuration of a draft's directory, as `to_json` wrote it. Raises `DraftError`."""
        try:
            found: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
            return cls(
                target_depth=found["num_target_layers"],
                target_layers=tuple(found["dflash_config"]["target_layer_ids"]),
                mask_token=found["mask_token_id"],
                max_positions=found["max_position_embeddings"],
                layers=found["num_hidden_layers"],
                heads=found["num_attention_heads"],
                kv_heads=found["num_key_value_heads"],
                **{
                    name: found[name]
                    for name in (
                        "hidden_size", "vocab_size", "block_size", "head_dim", "intermediate_size",
                        "markov_rank", "rope_theta", "dtype",
                    )
                },
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DraftError(f"{path}: no DSpark draft ({error!r}); give a draft's directory") from error

    def to_json(self) -> dict[str, Any]:
        """Content of `config.json`.

        The Markov head's fields stand at the top level and in `dflash_config`: SGLang 0.5.23 reads the one in
        some places and the other in others.
        """
        shared = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "confidence_head_with_markov": True,
        }
        return {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": NORM_EPS,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "dtype": self.dtype,
            "num_target_layers": self.target_depth,
            "sample_from_anchor": True,
            "enable_confidence_head": True,
            **shared,
            "dflash_config": {"target_layer_ids": list(self.target_layers), **shared},
        }


def random_weights(config: DraftConfig, seed: int = 0) -> dict[str, Tensor]:
    """Untrained tensors under the format's names; the same for the same seed and torch release."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config.hidden_size, config.head_dim

    def linear(out: int, into: int) -> Tensor:
        return torch.randn(out, into, generator=generator) * into**-0.5

    weights = {
        "fc.weight": linear(hidden, len(config.target_layers) * hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "markov_head.markov_w1.weight": torch.randn(
            config.vocab_size, config.markov_rank, generator=generator
        ),
        "markov_head.markov_w2.weight": linear(config.vocab_size, config.markov_rank),
        "confidence_head.proj.weight": linear(1, hidden + config.markov_rank),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    for layer in range(config.layers):
        at = f"layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(hidden),
            f"{at}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}.self_attn.q_proj.weight": linear(config.heads * width, hidden),
            f"{at}.self_attn.k_proj.weight": linear(config.kv_heads * width, hidden),
            f"{at}.self_attn.v_proj.weight": linear(config.kv_heads * width, hidden),
            f"{at}.self_attn.o_proj.weight": linear(hidden, config.heads * width),
            f"{at}.self_attn.q_norm.weight": torch.ones(width),
            f"{at}.self_attn.k_norm.weight": torch.ones(width),
            f"{at}.mlp.gate_proj.weight": linear(config.intermediate_size, hidden),
            f"{at}.mlp.up_proj.weight": linear(config.intermediate_size, hidden),
            f"{at}.mlp.down_proj.weight": linear(hidden, config.intermediate_size),
        }
    return weights


def write_successors(weights: dict[str, Tensor], config: DraftConfig, successors: Mapping[int, int]) -> None:
    """Make the Markov head propose `successors[token]` after each token that has one.

    A token's code is a random vector of nearly unit length, so that codes of different tokens hardly overlap;
    the head's row of a successor is the sum of the codes that lead to it. The backbone is turned down, else
    its noise would drown the table.
    """
    codes = weights["markov_head.markov_w1.weight"] * config.markov_rank**-0.5
    rows = torch.zeros(config.vocab_size, config.markov_rank)
    for token, successor in successors.items():
        rows[successor] += codes[token] * _SUCCESSOR_GAIN
    weights["markov_head.markov_w1.weight"] = codes
    weights["markov_head.markov_w2.weight"] = rows
    weights["norm.weight"] = torch.full_like(weights["norm.weight"], 0.01)


def build(
    path: Path,
    target: Path,
    *,
    seed: int = 0,
    block_size: int = 7,
    successors: Mapping[int, int] | None = None,
) -> DraftConfig:
    """Write a draft for the checkpoint `target` to the directory `path`, replacing one that stands there.

    Raises `DraftError` when the target can't be read, OSError when the directory can't be written.
    """
    config = DraftConfig.of(target, block_size=block_size)
    weights = random_weights(config, seed)
    if successors is not None:
        write_successors(weights, config, successors)
    save(path, config, weights)
    return config


def save(path: Path, config: DraftConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a draft to the directory `path`, replacing one that stands there. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    dtype: torch.dtype = getattr(torch, config.dtype)
    partial = path / "model.partial"
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(stored, partial, metadata={"format": "pt"})
    partial.replace(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_json(), indent=1) + "\n", encoding="utf-8")
