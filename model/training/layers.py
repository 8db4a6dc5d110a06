"""What all layers of a trainable K3 are made of: a product, a norm, SiTU.

The weights are float32; products run in the dtype of their input, norms in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
