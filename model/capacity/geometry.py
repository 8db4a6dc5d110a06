"""Sizes of Kimi K3 by its geometry: weights, KV of a token, a KDA state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

KvType = Literal["bf16", "fp8"]
StateType = Literal["fp32", "bf16"]
BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp8": 1}
# MXFP4: 4 bits a weight and one scale byte for 32 of them (OCP Microscaling Formats, 1.0).
MXFP4_BYTES: Final = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of `config.json` that sizes follow from; the defaults are those of the released K3."""

    layers: int = 93
    kda_layers: int = 69
    hidden: int = 7168
    vocabulary: int = 163_840
    kda_heads: int = 96
    kda_head_dim: int = 128
    conv_kernel: int = 4
    mla_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    dense_layers: int = 1
    dense_hidden: int = 33_792
    experts: int = 896
    shared_experts: int = 2
    expert_hidden: int = 3072
    routed_hidden: int = 3584
    context_tokens: int = 1_048_576

    def __post_init__(self) -> None:
        assert 0 < self.kda_layers < self.layers and self.dense_layers <= self.layers, self

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Geometry":
        """From a checkpoint's `config.json`. Raises KeyError for a field that is missing."""
        text = config["text_config"]
        linear = text["linear_attn_config"]
        return cls(
            layers=text["num_hidden_layers"],
            kda_layers=len(linear["kda_layers"]),
            hidden=text["hidden_size"],
            vocabulary=text["vocab_size"],
            kda_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            conv_kernel=linear["short_conv_kernel_size"],
            mla_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"],
            kv_lora_rank=text["kv_lora_rank"],
            nope_dim=text["qk_nope_head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
            dense_layers=text["first_k_dense_replace"],
            dense_hidden=text["intermediate_size"],
            experts=text["num_experts"],
            shared_experts=text["num_shared_experts"],
            expert_hidden=text["moe_intermediate_size"],
            routed_hidden=text["routed_expert_hidden_size"],
            context_tokens=text["max_position_embeddings"],
        )

    def kv_bytes(self, dtype: KvType = "bf16") -> int:
        """KV of one token in all MLA layers: the latent and the rope part. Every rank holds all of it."""
        return (self.layers - self.kda_layers) * (self.kv_lora_rank + self.rope_dim) * BYTES[dtype]

    def state_bytes(self, dtype: StateType = "fp32", ranks: int = 1) -> int:
        """One KDA state in all KDA layers, on one of `ranks` tensor parallel ranks.

        The recurrent matrices in `dtype`, the windows of the short convolutions in bf16.
        """
        matrices = self.kda_heads // ranks * self.kda_head_dim**2 * BYTES[dtype]
        windows = 3 * (self.kda_heads * self.kda_head_dim // ranks) * (self.conv_kernel - 1) * BYTES["bf16"]
        return self.kda_layers * (matrices + windows)

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts, which are stored in MXFP4."""
        moe_layers = self.layers - self.dense_layers
        return moe_layers * self.experts * 3 * self.routed_hidden * self.expert_hidden

    @property
    def other_parameters(self) -> int:
        """Parameters of all else that is large, stored in bf16; norms and biases are left out."""
        width = self.kda_heads * self.kda_head_dim
        # q, k, v, the output gate and the output; the decay's low-rank pair; beta.
        kda = 5 * self.hidden * width + self.kda_head_dim * (self.hidden + width)
        kda += self.hidden * self.kda_heads
        mla = self.hidden * self.q_lora_rank
        mla += self.q_lora_rank * self.mla_heads * (self.nope_dim + self.rope_dim)
        mla += self.hidden * (self.kv_lora_rank + self.rope_dim)
        mla += self.kv_lora_rank * self.mla_heads * (self.nope_dim + self.value_dim)
        mla += 2 * self.hidden * self.mla_heads * self.value_dim
        moe = self.shared_experts * 3 * self.hidden * self.expert_hidden
        moe += 2 * self.hidden * self.routed_hidden + self.hidden * self.experts
        dense = 3 * self.hidden * self.dense_hidden
        return (
            self.kda_layers * kda
            + (self.layers - self.kda_layers) * mla
            + (self.layers - self.dense_layers) * moe
            + self.dense_layers * dense
            + 2 * self.vocabulary * self.hidden
        )

    @property
    def weight_bytes(self) -> int:
        """All weights, routed experts in MXFP4 and the rest in bf16."""
        return int(self.expert_parameters * MXFP4_BYTES) + self.other_parameters * BYTES["bf16"]
