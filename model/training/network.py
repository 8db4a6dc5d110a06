"""A trainable K3: the same tensors under the same names as the released checkpoint, with gradients.

Whole sequences, no cache. Everything but attention and the carrying of KDA's states works on one flat axis of
tokens, so that batches of any shape with equally many tokens run the same compiled code. Weights are float32,
products run in the dtype that `Network` is given, the residual stream and KDA's states in float32.

Sources: Kimi Linear (arXiv 2510.26692) for KDA, DeepSeek-V2 (arXiv 2405.04434) for latent attention, the
configuration of the released K3 for everything else; `model.reference` states the same network independently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.training import delta
from model.training.geometry import Geometry


def situ(gate: Tensor, up: Tensor, geometry: Geometry) -> Tensor:
    """SiTU: a sigmoid-gated unit whose two branches are bounded by scaled tanh."""
    bound, linear = geometry.activation_situ_beta, geometry.activation_situ_linear_beta
    return bound * torch.tanh(gate / bound) * torch.sigmoid(gate) * (linear * torch.tanh(up / linear))


class Linear(nn.Module):
    """A product in the dtype of its input."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inner] -> [..., outer]."""
        return F.linear(x, self.weight.to(x.dtype))


class RmsNorm(nn.Module):
    """Root mean square normalisation in float32, with a gain a channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the dtype of `x`."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


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


class FeedForward(nn.Module):
    """SiTU feed-forward."""

    def __init__(self, geometry: Geometry, inner: int) -> None:
        super().__init__()
        self.geometry = geometry
        hidden = geometry.hidden_size
        self.gate_proj, self.up_proj = Linear(hidden, inner), Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.geometry))


class Router(nn.Module):
    """Sigmoid scores with a correction that only steers the choice of experts, not their weights."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(geometry.num_experts, geometry.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(geometry.num_experts), requires_grad=False)


class LatentMoe(nn.Module):
    """Stable LatentMoE: experts in a narrower latent space, normalised before they are widened again.

    All experts run on all tokens, as one wide product: at this size that is cheaper than gathering.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        experts, inner = geometry.num_experts, geometry.moe_intermediate_size
        latent, hidden = geometry.routed_expert_hidden_size, geometry.hidden_size
        self.gate = Router(geometry)
        self.w1 = nn.Parameter(torch.empty(experts, inner, latent))
        self.w3 = nn.Parameter(torch.empty(experts, inner, latent))
        self.w2 = nn.Parameter(torch.empty(experts, latent, inner))
        self.shared_experts = FeedForward(geometry, inner * geometry.num_shared_experts)
        self.routed_expert_down_proj = Linear(hidden, latent)
        self.routed_expert_norm = RmsNorm(latent, geometry.rms_norm_eps)
        self.routed_expert_up_proj = Linear(latent, hidden)
        self.scores: Tensor | None = None
        """Scores of the last batch, from which the correction is balanced."""

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> the same, and the router's scores [T, experts]."""
        geometry = self.geometry
        scores = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        chosen = (scores.detach() + self.gate.e_score_correction_bias).topk(
            geometry.num_experts_per_token, -1
        )
        picked = scores.gather(-1, chosen.indices)
        share = picked / picked.sum(-1, keepdim=True) * geometry.routed_scaling_factor
        weights = torch.zeros_like(scores).scatter(-1, chosen.indices, share)
        latent = self.routed_expert_down_proj(x)
        inner = situ(
            F.linear(latent, self.w1.flatten(0, 1).to(x.dtype)),
            F.linear(latent, self.w3.flatten(0, 1).to(x.dtype)),
            geometry,
        )
        weighted = inner.unflatten(-1, (geometry.num_experts, -1)) * weights.unsqueeze(-1).to(x.dtype)
        mixed = F.linear(weighted.flatten(1), self.w2.transpose(0, 1).flatten(1).to(x.dtype))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(mixed))
        return routed + self.shared_experts(x), scores.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> the same."""
        out, self.scores = self.mix(x)
        return out

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the correction towards the one that would have balanced the last batch."""
        assert self.scores is not None, "no batch yet"
        bias = self.gate.e_score_correction_bias
        bias.lerp_(quantile_correction(self.scores, bias, self.geometry.num_experts_per_token), rate)


def quantile_correction(scores: Tensor, correction: Tensor, chosen: int) -> Tensor:
    """Router correction with which every expert would have been chosen equally often (quantile balancing).

    A token's cut-off lies between its last chosen and its first rejected expert. An expert gets the share k/E
    of the tokens when its correction is minus the (1 - k/E) quantile of its scores measured from those
    cut-offs.

    Args:
        scores: [T, E] in (0, 1).
        correction: [E], under which the cut-offs are taken.
        chosen: k.

    Returns:
        [E], mean 0.
    """
    sample = scores[:: max(1, scores.shape[0] // 8192)]
    top = (sample + correction).topk(chosen + 1, -1).values
    cutoff = top[:, -2:].mean(-1, keepdim=True)
    level = 1 - chosen / scores.shape[1]
    wanted = -torch.quantile(sample - cutoff, level, dim=0)
    return wanted - wanted.mean()


def mix(rows: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """AttnRes: softmax attention of one learnt query over the finished blocks and the running one.

    Args:
        rows: each [T, hidden], the embedding first, the running block last.
        query: [1, hidden].
        gain: [hidden], of the norm that a row passes before it is scored.
        eps: of that norm.
    """
    stacked = torch.stack(tuple(rows), 1)
    scores = F.rms_norm(stacked, stacked.shape[-1:], gain, eps) @ query.squeeze(0)
    return (scores.softmax(-1).unsqueeze(-1) * stacked).sum(1)


class Layer(nn.Module):
    """One K3 layer; `Network` owns the residual stream."""

    def __init__(self, geometry: Geometry, index: int) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.self_attention_res_proj, self.mlp_res_proj = Linear(hidden, 1), Linear(hidden, 1)
        self.self_attention_res_norm, self.mlp_res_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        full = index in geometry.full_attention_layers
        self.self_attn = LatentAttention(geometry) if full else DeltaAttention(geometry)
        if index < geometry.first_k_dense_replace:
            self.mlp = FeedForward(geometry, geometry.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoe(geometry)

    @property
    def feed_forward(self) -> nn.Module:
        """The dense or the sparse feed-forward, whichever this layer has."""
        return self.mlp if hasattr(self, "mlp") else self.block_sparse_moe


class Body(nn.Module):
    """What the checkpoint calls `model`: everything but the output head."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.embed_tokens = nn.Embedding(geometry.vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(geometry, i) for i in range(geometry.num_hidden_layers))
        self.output_attn_res_proj = Linear(hidden, 1)
        self.output_attn_res_norm = RmsNorm(hidden, eps)
        self.norm = RmsNorm(hidden, eps)


class Network(nn.Module):
    """A whole K3 text model; parameter names are the checkpoint's without the prefix `language_model.`."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.geometry = geometry
        self.dtype = dtype
        self.mix = mix
        self.model = Body(geometry)
        self.lm_head = Linear(geometry.hidden_size, geometry.vocab_size)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers, in order."""
        return self.model.layers  # pyright: ignore[reportReturnType] -- a ModuleList

    def forward(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run whole sequences.

        Args:
            ids: [B, T] int64, T a multiple of 64.
            taps: layers after which to capture what the next layer's attention reads, before its norm: the
                features of a DSpark draft.

        Returns:
            The final hidden states after the last norm, [B * T, hidden] in the network's dtype (`lm_head`
            makes logits of them), and the captures in the order of `taps`, float32.
        """
        batch, length = ids.shape
        if length % delta.CHUNK_TOKENS:
            raise ValueError(
                f"length must be a multiple of {delta.CHUNK_TOKENS}, not {length}; pad the sequences"
            )
        position = torch.arange(length, device=ids.device).repeat(batch).unsqueeze(1)
        back = torch.arange(1, self.geometry.conv_kernel_size, device=ids.device)
        has_past = (position >= back).float()
        stream = self.model.embed_tokens(ids.flatten())
        bank: list[Tensor] = []
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = self._mix((*bank, stream), layer.self_attention_res_proj, layer.self_attention_res_norm)
            captured[index - 1] = x
            attended = layer.self_attn(layer.input_layernorm(x).to(self.dtype), batch, has_past).float()
            if index % self.geometry.attn_res_block_size == 0:
                bank.append(stream)
                stream = attended
            else:
                stream = stream + attended
            x = self._mix((*bank, stream), layer.mlp_res_proj, layer.mlp_res_norm)
            stream = stream + layer.feed_forward(layer.post_attention_layernorm(x).to(self.dtype)).float()
        out = self._mix((*bank, stream), self.model.output_attn_res_proj, self.model.output_attn_res_norm)
        captured[len(self.layers) - 1] = out
        return self.model.norm(out).to(self.dtype), [captured[tap] for tap in taps]

    def _mix(self, rows: tuple[Tensor, ...], proj: Linear, norm: RmsNorm) -> Tensor:
        return rows[0] if len(rows) == 1 else self.mix(rows, proj.weight, norm.weight, norm.eps)

    def balance(self, rate: float) -> None:
        """Balance every router (`LatentMoe.balance`)."""
        for layer in self.layers:
            if isinstance(moe := layer.feed_forward, LatentMoe):
                moe.balance(rate)

    def compile_parts(self) -> Callable[[], None]:
        """Compile what works on a flat axis of tokens, once for layers of a kind. Returns the way back."""
        parts: list[tuple[Any, str]] = [(self, "mix")]
        for layer in self.layers:
            parts += [(layer.self_attn, "before"), (layer.self_attn, "after")]
            is_sparse = isinstance(layer.feed_forward, LatentMoe)
            parts.append((layer.feed_forward, "mix" if is_sparse else "forward"))
        plain = [getattr(owner, name) for owner, name in parts]
        config = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] -- has no public name
        config.recompile_limit = max(64, config.recompile_limit)
        for (owner, name), function in zip(parts, plain, strict=True):
            setattr(owner, name, torch.compile(function, dynamic=False))

        def undo() -> None:
            for (owner, name), function in zip(parts, plain, strict=True):
                setattr(owner, name, function)

        return undo


@torch.no_grad()
def initialise(network: Network, seed: int) -> None:
    """Draw fresh weights: products keep their input's variance, those that write to the stream are small."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("A_log", "e_score_correction_bias", "res_proj.weight")):
            weight.zero_()
        elif name.endswith("dt_bias"):
            # Decays between about 0.97 and 0.9999 a token: memories of tens to thousands of tokens.
            weight.copy_(torch.empty(weight.shape).uniform_(-9.0, -3.0, generator=generator))
        else:
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("conv1d.weight"):
                drawn *= 0.3
                drawn[..., -1] += 0.7
            elif not name.endswith("embed_tokens.weight"):
                drawn *= weight.shape[-1] ** -0.5
            if (
                name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight"))
                and "routed" not in name
            ):
                drawn *= 0.5
            if name.endswith("lm_head.weight"):
                drawn *= 0.25
            weight.copy_(drawn)
