"""Attention residuals: a softmax over the running sum and the snapshots of earlier blocks."""

import torch
from torch import Tensor


def mix_residuals(prefix_sum: Tensor, bank: Tensor, score: Tensor, *, eps: float) -> Tensor:
    """Mix residual rows by the softmax of their normalised scores.

    Each row r (the snapshots, then the running sum) scores ``rms_norm(r) . score``; the result is the sum
    of the rows weighted by the softmax of the scores over rows. Sums run row by row, so a token's result is
    independent of the batch.

    Args:
        prefix_sum: [T, H], the running residual sum.
        bank: [T, R, H], the valid snapshots.
        score: [H] float32, the norm's weight times the score projection.
        eps: of the scores' RMS norm.

    Returns:
        [T, H] in the dtype of ``prefix_sum``.
    """
    rows = [row.float() for row in bank.unbind(1)] + [prefix_sum.float()]
    scores = torch.stack([(r * score).sum(-1) * torch.rsqrt(r.square().mean(-1) + eps) for r in rows], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    mixed = rows[0] * weights[:, 0:1]
    for j in range(1, len(rows)):
        mixed.addcmul_(rows[j], weights[:, j : j + 1])
    return mixed.to(prefix_sum.dtype)
