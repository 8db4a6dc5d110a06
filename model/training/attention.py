"""The attentions of a trainable K3, over whole sequences: Kimi Delta Attention and gated latent attention.

Sources: Kimi Linear (arXiv 2510.26692) for KDA, DeepSeek-V2 (arXiv 2405.04434) for latent attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.training import delta
from model.training.geometry import Geometry
from model.training.layers import Linear, RmsNorm


class ShortConv(nn.Module):
    """Causal depthwise convolution over time, then SiLU."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))

    def forward(self, x: Tensor, has_past: Tensor) -> Tensor:
        """[T, channels] -> the same, float32; `has_past` [T, kernel - 1] tells where a sequence begins."""
        kernel = self.weight.shape[-1]
        x = x.float()
        out = x * self.weight[:, 0, kernel - 1]
        for back in range(1, kernel):
            past = torch.roll(x, back, 0) * has_past[:, back - 1 : back]
            out = out + past * self.weight[:, 0, kernel - 1 - back]
        return F.silu(out)


class DeltaAttention(nn.Module):
    """KDA: short convolutions, the gated delta rule, an output norm gated by a full-rank sigmoid."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, heads, width = geometry.hidden_size, geometry.kda_heads, geometry.kda_head_dim
        inner = heads * width
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(inner, geometry.conv_kernel_size) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = Linear(hidden, width), Linear(width, inner)
        self.b_proj = Linear(hidden, heads)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.g_proj = Linear(hidden, inner)
        self.o_norm = RmsNorm(width, geometry.rms_norm_eps)
        self.o_proj = Linear(inner, hidden)

    def before(self, x: Tensor, has_past: Tensor) -> delta.Chunks:
        """All that does not depend on the states; `x` [T, hidden]."""
        heads, width = self.geometry.kda_heads, self.geometry.kda_head_dim
        shape = (-1, heads, width)
        q = self.q_conv1d(self.q_proj(x), has_past).view(shape)
        k = self.k_conv1d(self.k_proj(x), has_past).view(shape)
        v = self.v_conv1d(self.v_proj(x), has_past).view(shape)
        gate = self.f_b_proj(self.f_a_proj(x)).float().view(shape) + self.dt_bias.view(heads, width)
        g = self.geometry.gate_lower_bound * torch.sigmoid(self.A_log.exp().unsqueeze(-1) * gate)
        beta = torch.sigmoid(self.b_proj(x).float())
        return delta.prepare(_unit(q) * width**-0.5, _unit(k), v, g, beta)

    def after(self, x: Tensor, parts: delta.Chunks, entering: Tensor) -> Tensor:
        """Outputs, given the states before the chunks."""
        heads = self.geometry.kda_heads
        out = self.o_norm(delta.finish(parts, entering, heads)).flatten(1)
        return self.o_proj((out * torch.sigmoid(self.g_proj(x).float())).to(x.dtype))

    def forward(self, x: Tensor, batch: int, has_past: Tensor) -> Tensor:
        """[batch * T, hidden] -> the same; T a multiple of 64."""
        parts = self.before(x, has_past)
        entering = delta.carry_over(parts, batch, self.geometry.kda_heads)
        return self.after(x, parts, entering)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions, its output gated by a sigmoid."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, heads, eps = geometry.hidden_size, geometry.num_attention_heads, geometry.rms_norm_eps
        nope, shared, value = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim
        self.q_a_proj = Linear(hidden, geometry.q_lora_rank)
        self.q_a_layernorm = RmsNorm(geometry.q_lora_rank, eps)
        self.q_b_proj = Linear(geometry.q_lora_rank, heads * (nope + shared))
        self.kv_a_proj_with_mqa = Linear(hidden, geometry.kv_lora_rank + shared)
        self.kv_a_layernorm = RmsNorm(geometry.kv_lora_rank, eps)
        self.kv_b_proj = Linear(geometry.kv_lora_rank, heads * (nope + value))
        self.g_proj = Linear(hidden, heads * value)
        self.o_proj = Linear(heads * value, hidden)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [T, hidden], each [T, heads, nope + shared]."""
        geometry = self.geometry
        nope, shared, value = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim
        heads = geometry.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(-1, heads, nope + shared)
        latent, key = self.kv_a_proj_with_mqa(x).split((geometry.kv_lora_rank, shared), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(-1, heads, nope + value)
        k = torch.cat((expanded[..., :nope], key.unsqueeze(1).expand(-1, heads, -1)), -1)
        # One width for the fused kernels.
        return q, k, F.pad(expanded[..., nope:], (0, nope + shared - value))

    def after(self, x: Tensor, read: Tensor) -> Tensor:
        """What the heads read, [T, heads, nope + shared], gated and projected."""
        read = read[..., : self.geometry.v_head_dim].flatten(1)
        return self.o_proj(read * torch.sigmoid(self.g_proj(x)))

    def forward(self, x: Tensor, batch: int, has_past: Tensor) -> Tensor:
        """[batch * T, hidden] -> the same."""
        q, k, v = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in self.before(x))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after(x, read.transpose(1, 2).flatten(0, 1))
