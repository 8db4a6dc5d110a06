"""Root mean square norm with an output gate."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_gated(
    inputs: Tensor, gate: Tensor, weight: Tensor | None, *, eps: float, gate_activation: str
) -> Tensor:
    """Normalise the last axis, scale it, then multiply by the activated gate.

    KDA's head-wise norm and sigmoid output gate (Kimi Linear, arXiv 2510.26692, section 3.3).

    Args:
        inputs: [..., D].
        gate: as many elements as ``inputs``.
        weight: [D] or None.
        eps: added to the mean square.
        gate_activation: "sigmoid", or "swish" / "silu".

    Returns:
        The shape and dtype of ``inputs``; computed in float32.
    """
    if gate_activation not in ("sigmoid", "swish", "silu"):
        raise ValueError(f"gate_activation {gate_activation!r}: expected sigmoid, swish or silu")
    x = inputs.float()
    g = gate.reshape(inputs.shape).float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y *= weight.float()
    y *= torch.sigmoid(g) if gate_activation == "sigmoid" else F.silu(g)
    return y.to(inputs.dtype)
