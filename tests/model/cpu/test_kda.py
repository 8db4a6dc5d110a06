"""The chunked, batched and verifying forms of KDA against its definition, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cpu import kda

HEADS, WIDTH = 2, 16
TOLERANCE = 1e-4


def random_inputs(
    tokens: int, seed: int, bias: float = 0.0, width: int = WIDTH, bound: float | None = -5.0
) -> kda.KdaInputs:
    """Inputs whose gates lean to 0 (bias very negative), to the bound (very positive) or lie between."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    return kda.activate(
        normal(1, tokens, HEADS, width),
        normal(1, tokens, HEADS, width),
        normal(1, tokens, HEADS, width),
        normal(1, tokens, HEADS * width) * 3,
        normal(1, tokens, HEADS) * 3,
        a_log=torch.log(torch.rand(HEADS, generator=rng) * 15 + 1),
        dt_bias=normal(HEADS * width) + bias,
        lower_bound=bound,
    )


def random_states(count: int, seed: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, HEADS, width, width, generator=torch.Generator().manual_seed(seed))


def definition(inputs: kda.KdaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 1 of the Kimi Linear paper in float64, S as [H, K, V] and every matrix written out."""
    q, k, v, g, beta = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    s = state.double().transpose(1, 2)
    eye = torch.eye(q.shape[-1], dtype=torch.float64)
    outputs, states = [], []
    for t in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            erase = eye - beta[t, h] * torch.outer(k[t, h], k[t, h])
            written = beta[t, h] * torch.outer(k[t, h], v[t, h])
            heads.append(erase @ torch.diag(g[t, h].exp()) @ s[h] + written)
        s = torch.stack(heads)
        outputs.append(torch.einsum("hkv,hk->hv", s, q[t]))
        states.append(s.transpose(1, 2))
    return torch.stack(outputs), torch.stack(states)


def test_recurrence_equals_the_definition() -> None:
    inputs, state = random_inputs(40, seed=1), random_states(1, seed=2)[0]
    outputs, states = kda.recur(inputs, state)
    want_outputs, want_states = definition(inputs, state)
    torch.testing.assert_close(outputs.double(), want_outputs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.double(), want_states, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    bias=st.sampled_from([-100.0, -2.0, 0.0, 2.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_chunked_equals_recurrent(lengths: list[int], bias: float, seed: int) -> None:
    inputs = random_inputs(sum(lengths), seed, bias)
    states = random_states(len(lengths), seed + 1)
    tracked = {i: n // kda.CHUNK_TOKENS for i, n in enumerate(lengths)}
    outputs, final, snapshots = kda.chunked(inputs, lengths, states, tracked)
    start = 0
    for i, length in enumerate(lengths):
        rows = slice(start, start + length)
        want, after = kda.recur(inputs.rows(rows), states[i])
        torch.testing.assert_close(outputs[rows], want, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(final[i], after[-1], atol=TOLERANCE, rtol=TOLERANCE)
        border = tracked[i] * kda.CHUNK_TOKENS
        at_border = states[i] if border == 0 else after[border - 1]
        torch.testing.assert_close(snapshots[i], at_border, atol=TOLERANCE, rtol=TOLERANCE)
        start += length


@pytest.mark.parametrize("bound", [-5.0, kda.LOWEST_GATE])
def test_gates_exactly_at_their_bound_stay_finite(bound: float) -> None:
    inputs = random_inputs(256, seed=3, bias=1000.0, bound=bound)
    assert bool((inputs.g == bound).all())
    state = random_states(1, seed=4)
    outputs, final, _ = kda.chunked(inputs, [256], state)
    want, after = kda.recur(inputs, state[0])
    torch.testing.assert_close(outputs, want, atol=1e-6, rtol=TOLERANCE)
    torch.testing.assert_close(final[0], after[-1], atol=1e-6, rtol=TOLERANCE)


def test_gates_at_the_bound_beside_gates_at_zero() -> None:
    inputs = random_inputs(192, seed=5)
    g = inputs.g.clone()
    g[:, :, ::2], g[:, :, 1::2] = -5.0, 0.0
    mixed = kda.KdaInputs(inputs.q, inputs.k, inputs.v, g, inputs.beta)
    state = random_states(1, seed=6)
    outputs, final, _ = kda.chunked(mixed, [192], state)
    want, after = kda.recur(mixed, state[0])
    torch.testing.assert_close(outputs, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(final[0], after[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_equal_keys_written_with_full_strength() -> None:
    """The worst conditioned triangular system: every token overwrites the same direction, without decay."""
    inputs = random_inputs(128, seed=7)
    k = inputs.k[:1].expand_as(inputs.k).contiguous()
    hard = kda.KdaInputs(inputs.q, k, inputs.v, torch.zeros_like(inputs.g), torch.ones_like(inputs.beta))
    state = random_states(1, seed=8)
    outputs, final, _ = kda.chunked(hard, [128], state)
    want, after = kda.recur(hard, state[0])
    torch.testing.assert_close(outputs, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(final[0], after[-1], atol=TOLERANCE, rtol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 3), tail=st.integers(1, 130), seed=st.integers(0, 2**31))
def test_a_prefix_cut_at_a_page_border_gives_the_same_bits(cut: int, tail: int, seed: int) -> None:
    border = cut * kda.CHUNK_TOKENS
    inputs, state = random_inputs(border + tail, seed), random_states(1, seed + 1)
    whole, final, _ = kda.chunked(inputs, [border + tail], state)
    head, middle, _ = kda.chunked(inputs.rows(slice(0, border)), [border], state)
    rest, end, _ = kda.chunked(inputs.rows(slice(border, None)), [tail], middle)
    assert torch.equal(torch.cat((head, rest)), whole)
    assert torch.equal(end, final)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 130), min_size=2, max_size=4), seed=st.integers(0, 2**31))
def test_neighbours_in_a_batch_change_no_bit(lengths: list[int], seed: int) -> None:
    inputs, states = random_inputs(sum(lengths), seed), random_states(len(lengths), seed + 1)
    together, final, _ = kda.chunked(inputs, lengths, states)
    start = 0
    for i, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone, last, _ = kda.chunked(inputs.rows(rows), [length], states[i : i + 1])
        assert torch.equal(alone, together[rows])
        assert torch.equal(last[0], final[i])
        start += length


def test_no_tokens_leave_the_states_as_they_were() -> None:
    inputs, states = random_inputs(1, seed=9).rows(slice(0, 0)), random_states(2, seed=10)
    outputs, final, snapshots = kda.chunked(inputs, [0, 0], states, {1: 0})
    assert outputs.shape == (0, HEADS, WIDTH)
    assert torch.equal(final, states)
    assert torch.equal(snapshots[1], states[1])


def test_chunked_at_the_released_head_size() -> None:
    inputs, state = random_inputs(130, seed=11, width=128), random_states(1, seed=12, width=128)
    outputs, final, _ = kda.chunked(inputs, [130], state)
    want, after = kda.recur(inputs, state[0])
    torch.testing.assert_close(outputs, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(final[0], after[-1], atol=TOLERANCE, rtol=TOLERANCE)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_verify_keeps_the_state_after_every_draft_token(lengths: list[int], seed: int) -> None:
    inputs, states = random_inputs(sum(lengths), seed), random_states(len(lengths), seed + 1)
    untouched = states.clone()
    outputs, after = kda.verify(inputs, lengths, states)
    assert torch.equal(states, untouched)
    start = 0
    for i, length in enumerate(lengths):
        rows = slice(start, start + length)
        want, each = kda.recur(inputs.rows(rows), states[i])
        torch.testing.assert_close(outputs[rows], want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(after[i, :length], each, atol=1e-6, rtol=1e-6)
        start += length


def test_unbounded_gate_is_the_softplus_form() -> None:
    a_log, bias = torch.zeros(HEADS), torch.zeros(HEADS * WIDTH)
    raw = torch.randn(1, 3, HEADS * WIDTH)
    x = torch.randn(1, 3, HEADS, WIDTH)
    inputs = kda.activate(x, x, x, raw, torch.zeros(1, 3, HEADS), a_log=a_log, dt_bias=bias, lower_bound=None)
    want = -torch.nn.functional.softplus(raw).view(3, HEADS, WIDTH)
    torch.testing.assert_close(inputs.g, want)
