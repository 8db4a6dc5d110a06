"""The feed-forwards of a trainable K3: a dense one, and Stable LatentMoE with quantile-balanced routing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.training.geometry import Geometry
from model.training.layers import Linear, RmsNorm, situ


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
