"""Speculative sampling of a chain of draft tokens."""

import torch
from torch import Tensor


def verify_chain(
    candidates: Tensor, target: Tensor, draft: Tensor, coins: Tensor, final_coins: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain, then sample one token from the residual.

    Token-wise rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): draft token s is kept
    while ``coin * q < p``; at the first rejection the next token comes from ``max(p - q, 0)``, after full
    acceptance from ``p``. A ``q`` outside (0, 1] rejects.

    Args:
        candidates: [B, S], the last accepted token followed by S - 1 draft tokens.
        target: [B, S, V] probabilities of the token after each candidate.
        draft: [B, S - 1, V] probabilities from which the draft tokens were drawn.
        coins: [B, >= S - 1] uniform numbers of the acceptance tests.
        final_coins: [B] uniform numbers of the last sample.

    Returns:
        The number of accepted draft tokens [B] and the sampled next token [B], int64.
    """
    batch, slots = candidates.shape
    drafted = candidates[:, 1:].long().unsqueeze(-1)
    p = target[:, :-1].gather(2, drafted).squeeze(-1)
    q = draft[:, : slots - 1].gather(2, drafted).squeeze(-1)
    accept = (q > 0) & (q <= 1) & (coins[:, : slots - 1] * q < p)
    accepted = accept.long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(batch)
    residual = target[rows, accepted].float()
    rejected = (accepted < slots - 1).nonzero().squeeze(1)
    if rejected.numel():
        rest = draft[rejected, accepted[rejected]].float()
        rest = torch.where((rest >= 0) & (rest <= 1), rest, torch.zeros_like(rest))
        residual[rejected] = (residual[rejected] - rest).clamp(min=0)
    mass = residual.cumsum(dim=1)
    goal = final_coins.float().unsqueeze(1) * residual.sum(dim=1, keepdim=True)
    above = mass > goal
    last = torch.full((batch,), target.shape[-1] - 1)
    sampled = torch.where(above.any(dim=1), above.int().argmax(dim=1), last)
    return accepted, sampled
