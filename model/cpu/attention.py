"""Attention of a batch's new tokens over keys and values in a paged pool."""

import torch
from torch import Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, shared: bool = False
) -> Tensor:
    """Attention of one sequence's last ``n`` positions over its first ``m``.

    Heads may be grouped (GQA) or share one key (absorbed MLA, where the value is the key's leading part).

    Args:
        query: [n, H, D].
        key: [m, G, D] with H a multiple of G; the query rows are its last n positions.
        value: [m, G, Dv].
        scale: factor of the scores.
        causal: hide from each query the keys after its own position.
        shared: ``value`` is ``key[..., :Dv]``, as in absorbed MLA.

    Returns:
        [n, H, Dv] in the dtype of ``query``.
    """
    count, heads, _ = query.shape
    length, groups, width = value.shape
    dtype = query.dtype
    query, key = query.float(), key.float()
    value = key if shared else value.float()
    if count == 1:
        q = query.view(groups, heads // groups, -1)
        scores = torch.bmm(q, key.permute(1, 2, 0)).mul_(scale)
        out = torch.bmm(torch.softmax(scores, dim=-1), value.transpose(0, 1))
        return out.view(1, heads, -1)[..., :width].to(dtype)
    spread = heads // groups
    q = query.transpose(0, 1).unsqueeze(0)
    k = _spread(key, spread)
    v = k if shared else _spread(value, spread)
    if not causal:
        out, _ = _flash(q, k, v, causal=False, scale=scale)
    else:
        before = length - count
        out, weight = _flash(q, k[:, :, before:], v[:, :, before:], causal=True, scale=scale)
        if before:
            # All queries see all earlier keys: no mask, and the two parts are joined by their softmax sums.
            earlier, other = _flash(q, k[:, :, :before], v[:, :, :before], causal=False, scale=scale)
            total = torch.logaddexp(weight, other)
            out = out.mul_((weight - total).exp_().unsqueeze(-1))
            out.addcmul_(earlier, (other - total).exp_().unsqueeze(-1))
    return out[0].transpose(0, 1)[..., :width].to(dtype)


def _spread(rows: Tensor, heads: int) -> Tensor:
    """View [m, G, D] as [1, G * heads, m, D], each group repeated for its heads."""
    grouped = rows.transpose(0, 1).unsqueeze(1)
    length, width = grouped.shape[2:]
    return grouped.expand(-1, heads, -1, -1).reshape(1, -1, length, width)


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Flash attention on the CPU: [1, H, n, D], and the logarithm of each softmax sum [1, H, n].

    Called by its ATen name because the public function keeps the sums to itself.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
