"""Copies of recurrent states between slots of the pools: snapshots and commits.

Pools hold one state per layer and slot. A snapshot copies a running state to a tracked slot that the prefix
cache may keep; a commit copies the state after the last accepted draft token back to the running slot.
"""

from torch import Tensor


def snapshot_states(pools: tuple[Tensor, ...], sources: Tensor, mask: Tensor, targets: Tensor) -> None:
    """Copy the states of the masked requests to their tracked slots.

    Args:
        pools: tensors [layers, slots, ...], changed in place.
        sources: [B] running slots.
        mask: [B] booleans.
        targets: [B] tracked slots; a negative slot on either side skips the request.
    """
    rows = (mask & (sources >= 0) & (targets >= 0)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    source, target = sources[rows].long(), targets[rows].long()
    for pool in pools:
        pool[:, target] = pool[:, source]


def commit_states(
    pool: Tensor, steps: Tensor, *, targets: Tensor, accepted: Tensor, rows: Tensor | None
) -> None:
    """Copy the state after each request's accepted step to its slot.

    Args:
        pool: [layers, slots, ...], changed in place.
        steps: [layers, rows, T, ...], the state after each of T tokens.
        targets: [B] slots of ``pool``; negative skips.
        accepted: [B] step to commit; one outside [0, T) skips.
        rows: [B] rows of ``steps``, or None when request b has row b.
    """
    live = ((accepted >= 0) & (accepted < steps.shape[2]) & (targets >= 0)).nonzero().squeeze(1)
    if live.numel() == 0:
        return
    source = live if rows is None else rows[live].long()
    pool[:, targets[live].long()] = steps[:, source, accepted[live].long()].to(pool.dtype)
