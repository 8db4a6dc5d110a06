"""Attention of a batch's new tokens over keys and values in a paged pool."""

import torch
import torch.nn.functional as F
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
    mask = None
    if causal and count != length:
        # Query i stands at position length - count + i.
        mask = torch.ones(count, length, dtype=torch.bool).tril_(length - count)
    spread = heads // groups
    k = key.transpose(0, 1).unsqueeze(0)
    v = value.transpose(0, 1).unsqueeze(0)
    if spread > 1:
        k = k.unsqueeze(2).expand(-1, -1, spread, -1, -1).reshape(1, heads, length, -1)
        v = k if shared else v.unsqueeze(2).expand(-1, -1, spread, -1, -1).reshape(1, heads, length, -1)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
    )
    return out[0].transpose(0, 1)[..., :width].to(dtype)
