"""A trainable DSpark draft; parameter names and shapes are those of SGLang's `DSparkDraftModel`.

The context enters each layer as keys and values of its own, projected from captured hidden states of the
target; a block's tokens see the context before their anchor and each other, in both directions. The Markov
head adds what the previous token says about the next; the confidence head says how likely it is accepted.

Source: DSpark (arXiv 2607.05147); the layers are Qwen3's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculative.draft import NORM_EPS, DraftConfig


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions on the two halves of each head; `x` [B, heads, T, width], `positions` [B, T]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequencies
    low, high = x.float().split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over context and blocks."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, config.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, config.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.heads * width, hidden, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(width, NORM_EPS), nn.RMSNorm(width, NORM_EPS)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of [B, T, hidden], each [B, kv_heads, T, width]."""
        shape = (*x.shape[:2], self.config.kv_heads, self.config.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return rotate(k, positions, self.config.rope_theta), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """[B, Q, hidden] -> the same; `mask` [B, 1, Q, S + Q] over the context and the queries' own keys."""
        config = self.config
        q = self.q_norm(self.q_proj(x).unflatten(-1, (config.heads, config.head_dim))).transpose(1, 2)
        own = self.keys_values(x, positions)
        k, v = (
            torch.cat(pair, 2).repeat_interleave(config.heads // config.kv_heads, 1)
            for pair in zip(context, own, strict=True)
        )
        read = F.scaled_dot_product_attention(
            rotate(q, positions, config.rope_theta).to(v.dtype), k.to(v.dtype), v, attn_mask=mask
        )
        return self.o_proj(read.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer of the backbone."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """[B, Q, hidden] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Bias of the next token's logits by the previous token, of low rank."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Logit of the chance that a proposed token is accepted."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class DraftNetwork(nn.Module):
    """The draft without embedding and output head, which are the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, NORM_EPS), nn.RMSNorm(hidden, NORM_EPS)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def forward(self, embedded: Tensor, positions: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Run blocks.

        Args:
            embedded: [B, Q, hidden], the target's embeddings of the blocks' anchors and mask tokens.
            positions: [B, Q], from 0.
            features: [B, S, taps * hidden], the target's captures at positions 0 to S - 1.
            mask: [B, 1, Q, S + Q], true where a query may look.

        Returns:
            Final hidden states [B, Q, hidden]; the target's output head makes base logits of them.
        """
        return self.run(embedded, positions, self.contexts(features), mask)

    def contexts(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context for each layer, each [B, kv_heads, S, width]."""
        context = self.hidden_norm(self.fc(features))
        at = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        found: list[tuple[Tensor, Tensor]] = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            found.append(layer.self_attn.keys_values(context, at))
        return found

    def run(
        self, embedded: Tensor, positions: Tensor, contexts: Sequence[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """As `forward`, with the context as `contexts` gives it."""
        x = embedded
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, positions, context, mask)
        return self.norm(x)

    def codes(self, previous: Tensor) -> Tensor:
        """What the Markov head knows about the previous tokens, [..., markov_rank]."""
        return self.markov_head.markov_w1(previous)

    def bias(self, codes: Tensor) -> Tensor:
        """The Markov head's part of the logits, [..., vocab]."""
        return self.markov_head.markov_w2(codes)

    def confidence(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits of the chance of acceptance, [...]."""
        return self.confidence_head.proj(torch.cat((hidden, codes.to(hidden.dtype)), -1)).squeeze(-1)

    def tensors(self) -> dict[str, Tensor]:
        """All weights under the format's names, float32 on the CPU."""
        state: dict[str, Any] = self.state_dict()
        return {name: tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}
