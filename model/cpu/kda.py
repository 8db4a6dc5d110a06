"""Kimi Delta Attention: the gated delta rule, chunked and recurrent.

Notation of the Kimi Linear paper (arXiv 2510.26692, section 3). Per head, with the per-channel decay
``alpha_t = exp(g_t)`` and the write strength ``beta_t``, the state S in R^(K x V) follows

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,      o_t = S_t^T q_t.

Pools hold S transposed: [H, V, K]. q and k are normalised to unit length, q also scaled by K^-1/2.

**Chunked form** (same paper, section 3.1; the WY form of the delta rule is arXiv 2406.06484). With G_r the
sum of g over a chunk up to r and S_0 the state before the chunk, the pseudo values u solve a unit lower
triangular system:

    (I + Diag(beta) tril(A, -1)) U = Diag(beta) (V - (K * e^G) S_0),   A_ri = sum_c k_rc k_ic e^(G_rc - G_ic)
    o_r = (q_r * e^(G_r))^T S_0 + sum_(i <= r) B_ri u_i,               B_ri = sum_c q_rc k_ic e^(G_rc - G_ic)
    S_C = Diag(e^(G_C)) S_0 + sum_i (k_i * e^(G_C - G_i)) u_i^T.

``U = U0 - W S_0`` is linear in S_0, so all but one small product per chunk runs over all chunks at once.

**Range.** g may be -5 per token, so e^G over 64 tokens reaches e^-320 and e^-G overflows. Chunks are cut into
blocks of 16. Within a block both factors of e^(G_r - G_i) refer to its eighth token (exponents within +-40).
Between blocks the row refers to the start of its block, the column to the end of its own, and a third factor
spans the blocks between: no exponent is positive, so what underflows is zero in truth too.

A chunk is always 64 rows, padded with tokens that neither read nor write (k = q = 0, beta = 0, g = 0), and
starts at the sequence's first new token. Prefixes end at multiples of 64, so a token's arithmetic doesn't
depend on where a prefix was cut nor on its neighbours in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
# Two factors of one block may differ by half a block's decay: e^(8 * 10) is still finite in float32.
LOWEST_GATE = -10.0


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """Activated inputs of the delta rule for T packed tokens, float32.

    Attributes:
        q: [T, H, K], unit length times K^-1/2.
        k: [T, H, K], unit length.
        v: [T, H, V].
        g: [T, H, K], log decay, never positive.
        beta: [T, H], write strength in (0, 1).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def __post_init__(self) -> None:
        assert self.q.shape == self.k.shape == self.g.shape, "q, k and g differ in shape"
        assert self.v.shape[:2] == self.q.shape[:2] == self.beta.shape, "v or beta doesn't fit q"

    def rows(self, index: Tensor | slice) -> "KdaInputs":
        """The same for some of the tokens."""
        return KdaInputs(self.q[index], self.k[index], self.v[index], self.g[index], self.beta[index])


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> KdaInputs:
    """Turn the projections into the inputs of the delta rule.

    ``g = lower_bound * sigmoid(e^a_log (gate + dt_bias))`` (K3's bounded gate), or without a bound
    ``-e^a_log softplus(gate + dt_bias)``; ``beta`` is a logit.

    Args:
        q, k: H * K elements a token, v: H * V a token, in any shape whose last axis is the head's.
        gate: H * K elements a token, raw.
        beta: H elements a token, raw.
        a_log: H elements.
        dt_bias: H * K elements.
        lower_bound: the least log decay of a token, or None.
    """
    heads, width = q.shape[-2], q.shape[-1]
    qf = q.reshape(-1, heads, width).float()
    kf = k.reshape(-1, heads, width).float()
    z = gate.reshape(-1, heads, width).float() + dt_bias.float().view(heads, width)
    rate = a_log.float().view(heads, 1).exp()
    g = -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)
    return KdaInputs(
        q=qf * torch.rsqrt(qf.square().sum(-1, keepdim=True) + 1e-6).mul_(width**-0.5),
        k=kf * torch.rsqrt(kf.square().sum(-1, keepdim=True) + 1e-6),
        v=v.reshape(-1, heads, v.shape[-1]).float(),
        g=g,
        beta=torch.sigmoid(beta.reshape(-1, heads).float()),
    )


def step(inputs: KdaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance B independent sequences by one token each.

    Args:
        inputs: B tokens, one a sequence.
        state: [B, H, V, K].

    Returns:
        Outputs [B, H, V] and the new states [B, H, V, K].
    """
    decayed = state * inputs.g.exp().unsqueeze(-2)
    k = inputs.k.unsqueeze(-2)
    u = (inputs.v - (decayed * k).sum(-1)).mul_(inputs.beta.unsqueeze(-1))
    after = decayed.addcmul_(u.unsqueeze(-1), k)
    return (after * inputs.q.unsqueeze(-2)).sum(-1), after


def recur(inputs: KdaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run one sequence token by token: the definition that the other forms must equal.

    Args:
        inputs: T tokens of one sequence.
        state: [H, V, K], the state before them.

    Returns:
        Outputs [T, H, V] and the state after each token [T, H, V, K].
    """
    outputs, states = [], []
    current = state.unsqueeze(0)
    for t in range(inputs.q.shape[0]):
        out, current = step(inputs.rows(slice(t, t + 1)), current)
        outputs.append(out)
        states.append(current)
    return torch.cat(outputs), torch.cat(states)


def verify(inputs: KdaInputs, lengths: Sequence[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a few draft tokens of each sequence and keep the state after every one.

    Args:
        inputs: the sequences' tokens one after another.
        lengths: tokens of each of B sequences.
        state: [B, H, V, K] before the tokens; unchanged.

    Returns:
        Outputs [T, H, V] and states [B, max(lengths), H, V, K]; later steps repeat a sequence's last state.
    """
    longest = max(lengths)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    counts = torch.tensor(lengths)
    outputs = torch.empty_like(inputs.v)
    states = state.new_empty(state.shape[0], longest, *state.shape[1:])
    current = state
    for t in range(longest):
        live = (counts > t).nonzero().squeeze(1)
        tokens = starts[live] + t
        out, after = step(inputs.rows(tokens), current[live])
        outputs[tokens] = out
        current = current.clone().index_copy_(0, live, after)
        states[:, t] = current
    return outputs, states


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What N chunks contribute, independent of the state before them (leading axis N * H)."""

    q_in: Tensor  # q * e^G: reads the state before the chunk
    reads: Tensor  # B: reads the chunk's own pseudo values
    u0: Tensor
    w: Tensor
    carry: Tensor  # S_C^T = S_0^T carry + writes
    writes: Tensor


def _prepare(inputs: KdaInputs, chunks: int) -> _Chunks:
    """Batch the state-free part of the chunked form over all chunks and heads."""
    heads, width = inputs.q.shape[1:]
    batch = chunks * heads

    def by_chunk(x: Tensor) -> Tensor:
        split = x.view(chunks, CHUNK_TOKENS, heads, -1)
        return split.transpose(1, 2).contiguous().view(batch, CHUNK_TOKENS, -1)

    q, k, v, g, beta = (by_chunk(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    blocks = (batch, BLOCKS, BLOCK_TOKENS, width)
    local = g.view(blocks).cumsum(2)  # log decay from the block's start, inclusive
    middle = local[:, :, BLOCK_TOKENS // 2 - 1 : BLOCK_TOKENS // 2]
    total = local[:, :, -1:]
    past = (local - middle).exp_()
    k_row, q_row = k.view(blocks) * past, q.view(blocks) * past
    k_col = k.view(blocks).mul(past.reciprocal_())
    flat = (batch * BLOCKS, BLOCK_TOKENS, width)
    within = k_col.view(flat).transpose(1, 2)
    a_within = torch.bmm(k_row.view(flat), within).view(batch, BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS)
    b_within = torch.bmm(q_row.view(flat), within).view(batch, BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS)

    # From here rows are weighed from their block's start, columns to its end.
    start = middle.exp()
    k_row.mul_(start)
    q_row.mul_(start)
    k_col.mul_((total - middle).exp_())
    a = q.new_zeros(batch, CHUNK_TOKENS, CHUNK_TOKENS)
    b = q.new_zeros(batch, CHUNK_TOKENS, CHUNK_TOKENS)
    # Log decay over the blocks that lie between an earlier block and this one: summed anew, since
    # a difference of long sums would lose the short ones.
    between = total[:, :0]
    for i in range(BLOCKS):
        lo, hi = i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS
        a[:, lo:hi, lo:hi] = a_within[:, i]
        b[:, lo:hi, lo:hi] = b_within[:, i]
        if i:
            between = torch.cat((between + total[:, i - 1 : i], torch.zeros_like(total[:, :1])), dim=1)
            seen = (k_col[:, :i] * between.exp()).view(batch, lo, width).transpose(1, 2)
            a[:, lo:hi, :lo] = torch.bmm(k_row[:, i], seen)
            b[:, lo:hi, :lo] = torch.bmm(q_row[:, i], seen)

    before = F.pad(total[:, :-1], (0, 0, 0, 0, 1, 0)).cumsum(1).exp_()
    after = F.pad(total[:, 1:].flip(1), (0, 0, 0, 0, 1, 0)).cumsum(1).flip(1).exp_()
    k_in = k_row.mul_(before).view(batch, CHUNK_TOKENS, width)
    q_in = q_row.mul_(before).view(batch, CHUNK_TOKENS, width)
    k_out = k_col.mul_(after).view(batch, CHUNK_TOKENS, width)
    # With unitriangular=True the solver reads only what lies below the diagonal.
    solved = torch.linalg.solve_triangular(
        a * beta, torch.cat((v, k_in), dim=-1) * beta, upper=False, unitriangular=True
    )
    u0, w = solved.split((v.shape[-1], width), dim=-1)
    carry = torch.diag_embed(total.sum(1).exp_().squeeze(1)) - torch.bmm(w.transpose(1, 2), k_out)
    return _Chunks(q_in, b.tril_(), u0, w, carry, torch.bmm(u0.transpose(1, 2), k_out))


def chunked(
    inputs: KdaInputs, lengths: Sequence[int], states: Tensor, tracked: Mapping[int, int] | None = None
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Run whole sequences in chunks of 64 tokens.

    Args:
        inputs: the sequences' tokens one after another, ``sum(lengths)`` of them; g at least -10.
        lengths: tokens of each of B sequences.
        states: [B, H, V, K] float32, before the tokens; unchanged.
        tracked: for some sequences the number of whole chunks after which to snapshot the state.

    Returns:
        Outputs [T, H, V]; the states after the sequences [B, H, V, K]; the snapshots [H, V, K] by sequence.
    """
    tracked = tracked or {}
    heads, value_width = inputs.v.shape[1:]
    counts = [-(-n // CHUNK_TOKENS) for n in lengths]
    total = sum(counts)
    final = states.clone()
    snapshots = {i: states[i].clone() for i, n in tracked.items() if n == 0}
    if total == 0:
        return torch.empty_like(inputs.v), final, snapshots
    packed, place = _pad(inputs, lengths, counts)
    parts = _prepare(packed, total)
    carry = parts.carry.view(total, heads, *parts.carry.shape[1:])
    writes = parts.writes.view(total, heads, *parts.writes.shape[1:])
    before = torch.empty_like(writes)
    chunk = 0
    for i, count in enumerate(counts):
        current = states[i]
        for n in range(1, count + 1):
            before[chunk] = current
            current = torch.baddbmm(writes[chunk], current, carry[chunk])
            chunk += 1
            if tracked.get(i) == n:
                snapshots[i] = current.clone()
        final[i] = current
    entering = before.view(total * heads, value_width, -1).transpose(1, 2)
    u = torch.baddbmm(parts.u0, parts.w, entering, alpha=-1)
    out = torch.baddbmm(torch.bmm(parts.reads, u), parts.q_in, entering)
    out = out.view(total, heads, CHUNK_TOKENS, value_width).transpose(1, 2).reshape(-1, heads, value_width)
    return (out if place is None else out[place]), final, snapshots


def _pad(inputs: KdaInputs, lengths: Sequence[int], counts: Sequence[int]) -> tuple[KdaInputs, Tensor | None]:
    """Pad every sequence to whole chunks; also where each token went (None: nothing moved)."""
    if all(n % CHUNK_TOKENS == 0 for n in lengths):
        return inputs, None
    places, first = [], 0
    for length, count in zip(lengths, counts, strict=True):
        places.append(torch.arange(first, first + length))
        first += count * CHUNK_TOKENS
    place = torch.cat(places)

    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(first, *x.shape[1:]).index_copy_(0, place, x)

    padded = KdaInputs(
        spread(inputs.q), spread(inputs.k), spread(inputs.v), spread(inputs.g), spread(inputs.beta)
    )
    return padded, place
