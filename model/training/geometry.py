"""Sizes of a trainable K3, and those of the small one that is trained here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from model import tiny
from model.vocabulary import special_ids

VOCAB_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a K3, named as in the `text_config` of its `config.json`; layers count from 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float
    full_attention_layers: frozenset[int]
    attn_res_block_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float

    def __post_init__(self) -> None:
        assert 0 < self.num_experts_per_token < self.num_experts
        assert self.v_head_dim <= self.qk_nope_head_dim + self.qk_rope_head_dim
        assert all(0 <= layer < self.num_hidden_layers for layer in self.full_attention_layers)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a `config.json` (whole, or its `text_config`). Raises KeyError for a field that is missing."""
        text: Mapping[str, Any] = config.get("text_config", config)
        linear = text["linear_attn_config"]
        derived = {
            "kda_heads": linear["num_heads"],
            "kda_head_dim": linear["head_dim"],
            "conv_kernel_size": linear["short_conv_kernel_size"],
            "gate_lower_bound": linear["gate_lower_bound"],
            "full_attention_layers": frozenset(layer - 1 for layer in linear["full_attn_layers"]),
        }
        return cls(**derived, **{name: text[name] for name in cls.__slots__ if name not in derived})


def small_config(**sizes: Any) -> dict[str, Any]:
    """Content of `config.json` of the small K3; `sizes` override fields of its `text_config`."""
    config = tiny.config()
    ids = special_ids(VOCAB_SIZE)
    tokens = {
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|end_of_msg|>"],
        "pad_token_id": ids["[PAD]"],
    }
    text: dict[str, Any] = {
        **config["text_config"],
        **tokens,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 96,
        "routed_expert_hidden_size": 192,
        "dtype": "bfloat16",
    }
    text["linear_attn_config"] = {**text["linear_attn_config"], "num_heads": 4, "head_dim": 64}
    text |= sizes
    layers, full = text["num_hidden_layers"], text["linear_attn_config"]["full_attn_layers"]
    text["linear_attn_config"]["full_attn_layers"] = [layer for layer in full if layer <= layers]
    text["linear_attn_config"]["kda_layers"] = [n for n in range(1, layers + 1) if n not in full]
    vision = {**config["vision_config"], "text_hidden_size": text["hidden_size"]}
    return {
        **config,
        **tokens,
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision,
    }
