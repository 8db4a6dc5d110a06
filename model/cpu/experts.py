"""Routed experts: gathered matrix products, one expert at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """Bounded SwiGLU: ``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``.

    Kimi K3's SiTU activation; without ``linear_beta`` the linear branch stays unbounded. Elementwise over
    equal shapes, in the dtype of the inputs.
    """
    gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return gated * up


def routed_experts(
    inputs: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    *,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
) -> Tensor:
    """Sum of each token's chosen experts, weighted.

    Args:
        inputs: [T, D].
        gate_up: [E, 2 I, D], gate rows before up rows.
        down: [E, D, I].
        expert_ids: [T, K] integers; a negative one chooses nothing.
        weights: [T, K].
        activation: "situ" or "silu".
        beta: SiTU's bound of the gate branch.
        linear_beta: SiTU's bound of the linear branch, or None.

    Returns:
        [T, D] in the dtype of ``inputs``.
    """
    if activation == "situ" and beta is None:
        raise ValueError("activation situ needs beta (activation_situ_beta in the checkpoint's config)")
    if activation not in ("situ", "silu"):
        raise ValueError(f"activation {activation!r}: expected situ or silu")
    tokens, chosen = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat[flat >= 0], minlength=gate_up.shape[0]).tolist()
    start = int((flat < 0).sum())
    rows = inputs[torch.div(order, chosen, rounding_mode="floor")]
    outputs = rows.new_zeros(tokens * chosen, down.shape[1])
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        gate, up = (rows[start:end] @ gate_up[expert].t()).float().chunk(2, dim=-1)
        if activation == "situ":
            assert beta is not None
            hidden = situ(gate, up, beta=beta, linear_beta=linear_beta)
        else:
            hidden = F.silu(gate) * up
        torch.mm(hidden.to(inputs.dtype), down[expert].t(), out=outputs[start:end])
        start = end
    placed = torch.empty_like(outputs)
    placed[order] = outputs
    placed = placed.view(tokens, chosen, -1)
    mixed = placed[:, 0] * weights[:, 0:1]
    for j in range(1, chosen):
        mixed.addcmul_(placed[:, j], weights[:, j : j + 1].to(mixed.dtype))
    return mixed.to(inputs.dtype)
