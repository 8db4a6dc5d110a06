"""Reads and writes of the table that maps a request's positions to token slots of the KV pool."""

import torch
from torch import Tensor


def last_slots(table: Tensor, requests: Tensor, lengths: Tensor) -> Tensor:
    """Slot of each request's last position, -1 for an empty request.

    Args:
        table: [requests, positions] slots.
        requests: [B] rows of ``table``.
        lengths: [B] positions in use.

    Returns:
        [B] in the dtype of ``lengths``.
    """
    found = table[requests.long(), (lengths - 1).clamp(min=0).long()].to(lengths.dtype)
    return torch.where(lengths > 0, found, torch.full_like(lengths, -1))


def assign_slots(table: Tensor, requests: Tensor, starts: Tensor, ends: Tensor, slots: Tensor) -> None:
    """Write ``slots``, request after request, to the positions [start, end) of each request's row."""
    offset = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if end > start:
            table[row, start:end] = slots[offset : offset + end - start].to(table.dtype)
            offset += end - start


def read_slots(table: Tensor, requests: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Slots at the positions [start, end) of each request's row, request after request, int64."""
    rows = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return torch.cat([table[row, start:end] for row, start, end in rows]).to(torch.int64)
