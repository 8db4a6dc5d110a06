"""The gated delta rule over whole sequences, with gradients, in batched products that suit any device.

The chunked form of Kimi Linear (arXiv 2510.26692, section 3.1) in the notation of `model.cpu.kda`, with three
differences, all for the sake of gradients and of parallel hardware:

- nothing is written in place;
- the unit lower triangular system is solved by the inverse of its 16 x 16 diagonal blocks, each a product of
  four factors ``(I - L)(I + L^2)(I + L^4)(I + L^8)`` (L is nilpotent), joined to 64 x 64 block by block;
- states are carried over the chunks in two levels, within groups and then from group to group, so that n
  chunks take about 2 sqrt(n) steps after one another.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


class Chunks(NamedTuple):
    """What N chunks contribute, independent of the state before them; leading axis N * H."""

    q_in: Tensor
    """q * e^G: reads the state before the chunk."""
    reads: Tensor
    """Reads the chunk's own pseudo values."""
    u0: Tensor
    w: Tensor
    carry: Tensor
    """``S_C^T = S_0^T carry + writes``, S^T being [V, K]."""
    writes: Tensor


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunks:
    """The state-free part of the chunked form for all chunks and heads at once.

    Args:
        q, k: [T, H, K] float32, unit length, q scaled; T a multiple of 64.
        v: [T, H, V].
        g: [T, H, K] log decay in [-10, 0].
        beta: [T, H] in (0, 1).
    """
    tokens, heads, width = q.shape
    chunks = tokens // CHUNK_TOKENS
    batch = chunks * heads

    def by_chunk(x: Tensor) -> Tensor:
        return x.reshape(chunks, CHUNK_TOKENS, heads, -1).transpose(1, 2).reshape(batch, CHUNK_TOKENS, -1)

    q, k, v, g, beta = (by_chunk(x) for x in (q, k, v, g, beta))
    blocks = (batch, BLOCKS, BLOCK_TOKENS, width)
    q4, k4 = q.reshape(blocks), k.reshape(blocks)
    local = g.reshape(blocks).cumsum(2)
    middle = local[:, :, BLOCK_TOKENS // 2 - 1 : BLOCK_TOKENS // 2]
    total = local[:, :, -1:]
    past = (local - middle).exp()
    k_within = k4 * (middle - local).exp()
    a_within = (k4 * past) @ k_within.transpose(2, 3)
    b_within = (q4 * past) @ k_within.transpose(2, 3)

    # From here rows are weighed from their block's start, columns to its end.
    k_row, q_row = k4 * local.exp(), q4 * local.exp()
    k_col = k4 * (total - local).exp()
    ends = total.squeeze(2).cumsum(1)  # log decay from the chunk's start to each block's end
    # Row block i, column block j < i: decay over the blocks between them.
    starts = ends - total.squeeze(2)
    a_rows: list[Tensor] = []
    b_rows: list[Tensor] = []
    for i in range(BLOCKS):
        parts_a, parts_b = [a_within[:, i]], [b_within[:, i]]
        if i:
            between = (starts[:, i : i + 1] - ends[:, :i]).clamp(max=0).exp().unsqueeze(2)
            seen = (k_col[:, :i] * between).reshape(batch, i * BLOCK_TOKENS, width).transpose(1, 2)
            parts_a.insert(0, k_row[:, i] @ seen)
            parts_b.insert(0, q_row[:, i] @ seen)
        if rest := BLOCKS - 1 - i:
            zeros = q.new_zeros(batch, BLOCK_TOKENS, rest * BLOCK_TOKENS)
            parts_a.append(zeros)
            parts_b.append(zeros)
        a_rows.append(torch.cat(parts_a, -1))
        b_rows.append(torch.cat(parts_b, -1))
    a, reads = torch.cat(a_rows, 1), torch.cat(b_rows, 1).tril()

    before = starts.exp().unsqueeze(2)
    after = (ends[:, -1:] - ends).exp().unsqueeze(2)
    k_in = (k_row * before).reshape(batch, CHUNK_TOKENS, width)
    q_in = (q_row * before).reshape(batch, CHUNK_TOKENS, width)
    k_out = (k_col * after).reshape(batch, CHUNK_TOKENS, width)
    inverse = unit_lower_inverse((a * beta).tril(-1))
    u0, w = inverse @ (v * beta), inverse @ (k_in * beta)
    carry = torch.diag_embed(ends[:, -1].exp()) - w.transpose(1, 2) @ k_out
    return Chunks(q_in, reads, u0, w, carry, u0.transpose(1, 2) @ k_out)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """``(I + lower)^-1`` for strictly lower triangular matrices [..., 64, 64]."""
    eye = torch.eye(BLOCK_TOKENS, dtype=lower.dtype, device=lower.device)
    size = BLOCK_TOKENS
    blocks = [lower[..., i : i + size, i : i + size] for i in range(0, CHUNK_TOKENS, size)]
    diagonal = torch.stack(blocks, -3)
    inverse = eye - diagonal
    power = diagonal
    for _ in range(3):  # L^2, L^4, L^8; L^16 = 0
        power = power @ power
        inverse = inverse + inverse @ power
    inverses = list(inverse.unbind(-3))
    while len(inverses) > 1:
        joined: list[Tensor] = []
        for n in range(0, len(inverses), 2):
            top, bottom = inverses[n], inverses[n + 1]
            at = n * size
            corner = lower[..., at + size : at + 2 * size, at : at + size]
            left = torch.cat((top, -bottom @ corner @ top), -2)
            right = torch.cat((torch.zeros_like(bottom), bottom), -2)
            joined.append(torch.cat((left, right), -1))
        inverses, size = joined, 2 * size
    return inverses[0]


def entering_states(carry: Tensor, writes: Tensor) -> Tensor:
    """State before each chunk, transposed: ``s_(n+1) = s_n carry_n + writes_n`` from ``s_0 = 0``.

    Args:
        carry: [B, n, H, K, K].
        writes: [B, n, H, V, K].

    Returns:
        [B, n, H, V, K].
    """
    batch, chunks, heads, width = carry.shape[:4]
    value = writes.shape[3]
    inner = max(d for d in range(1, math.isqrt(chunks) + 1) if chunks % d == 0)
    outer = chunks // inner
    if inner < 4:  # nothing to gain
        inner, outer = chunks, 1
    carry = carry.reshape(batch * outer, inner, heads, width, width).transpose(0, 1).flatten(1, 2)
    writes = writes.reshape(batch * outer, inner, heads, value, width).transpose(0, 1).flatten(1, 2)
    # All groups at once: the state that each would have from nothing, and what it does to an earlier one.
    state = torch.zeros_like(writes[0])
    decay = torch.eye(width, dtype=carry.dtype, device=carry.device).expand_as(carry[0])
    states, decays = [state], [decay]
    for n in range(inner):
        state = torch.baddbmm(writes[n], state, carry[n])
        states.append(state)
        if outer > 1:
            decay = decay @ carry[n] if n else carry[0]
            decays.append(decay)
    own = torch.stack(states[:-1])
    if outer == 1:
        return own.view(inner, batch, heads, value, width).transpose(0, 1)
    group_writes = states[-1].view(batch, outer, heads, value, width)
    group_decay = decays[-1].view(batch, outer, heads, width, width)
    current = torch.zeros_like(group_writes[:, 0])
    firsts: list[Tensor] = []
    for n in range(outer):
        firsts.append(current)
        current = group_writes[:, n] + current @ group_decay[:, n]
    first = torch.stack(firsts, 1).view(batch * outer * heads, value, width)
    whole = own + first.unsqueeze(0) @ torch.stack(decays[:-1])
    return whole.view(inner, batch, outer, heads, value, width).permute(1, 2, 0, 3, 4, 5).flatten(1, 2)


def finish(parts: Chunks, before: Tensor, heads: int) -> Tensor:
    """Outputs of all tokens, given the states before their chunks.

    Args:
        parts: of N chunks.
        before: [N * H, V, K].
        heads: H.

    Returns:
        [T, H, V].
    """
    entering = before.transpose(1, 2)
    u = parts.u0 - parts.w @ entering
    out = parts.reads @ u + parts.q_in @ entering
    return out.view(-1, heads, CHUNK_TOKENS, out.shape[-1]).transpose(1, 2).flatten(0, 1)


def carry_over(parts: Chunks, batch: int, heads: int) -> Tensor:
    """States before all chunks of `batch` sequences of equal length, [N * H, V, K]."""
    carry = parts.carry.view(batch, -1, heads, *parts.carry.shape[1:])
    writes = parts.writes.view(batch, -1, heads, *parts.writes.shape[1:])
    return entering_states(carry, writes).flatten(0, 2)
