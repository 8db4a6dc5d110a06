"""The short convolution against torch's own, and its windows against a replay."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cpu.convolution import convolve_sequences, convolve_step

DIM, WIDTH = 6, 4


def plain(history: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of torch's depthwise convolution over history [W - 1, dim] and inputs [T, dim]."""
    window = torch.cat((history, inputs)).t().unsqueeze(0)
    return F.silu(F.conv1d(window, weight.unsqueeze(1), groups=weight.shape[0]))[0].t()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    continued=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_packed_sequences_equal_each_alone(lengths: list[int], continued: list[bool], seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(DIM, WIDTH)
    inputs = torch.randn(sum(lengths), DIM)
    states = torch.randn(6, DIM, WIDTH - 1)
    before = states.clone()
    slots = [5, 2, 0, 3][: len(lengths)]
    flags = continued[: len(lengths)]
    out = convolve_sequences(inputs, weight, None, states, lengths, slots, flags)
    start = 0
    for length, slot, cont in zip(lengths, slots, flags, strict=True):
        rows = inputs[start : start + length]
        history = before[slot].t() if cont else torch.zeros(WIDTH - 1, DIM)
        if length:
            torch.testing.assert_close(out[start : start + length], plain(history, rows, weight))
            assert torch.equal(states[slot], torch.cat((history, rows))[-(WIDTH - 1) :].t())
        else:
            assert torch.equal(states[slot], before[slot])
        start += length
    for slot in {1, 4}:
        assert torch.equal(states[slot], before[slot])


def test_padding_is_skipped() -> None:
    states = torch.randn(2, DIM, WIDTH - 1)
    before = states.clone()
    out = convolve_sequences(torch.randn(3, DIM), torch.randn(DIM, WIDTH), None, states, [3], [-1], [True])
    assert torch.equal(out, torch.zeros(3, DIM))
    assert torch.equal(states, before)


def test_prefill_then_steps_equal_one_prefill() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(DIM, WIDTH), torch.randn(DIM)
    inputs = torch.randn(12, DIM)
    whole = convolve_sequences(inputs, weight, bias, torch.zeros(1, DIM, WIDTH - 1), [12], [0], [False])
    states = torch.zeros(1, DIM, WIDTH - 1)
    head = convolve_sequences(inputs[:7], weight, bias, states, [7], [0], [False])
    steps = [
        convolve_step(inputs[t].view(1, 1, DIM), weight, bias, states, torch.tensor([0]))[0, 0]
        for t in range(7, 12)
    ]
    assert torch.equal(torch.cat((head, torch.stack(steps))), whole)


def test_a_step_of_a_batch_with_padding_keeps_windows() -> None:
    torch.manual_seed(1)
    weight = torch.randn(DIM, WIDTH)
    inputs = torch.randn(3, 5, DIM)
    pool = torch.randn(4, WIDTH - 1, DIM)
    states = pool.transpose(1, 2)  # the pool's own order is [slots, W - 1, dim]
    before = states.clone()
    windows = torch.zeros(4, 5, DIM, WIDTH - 1)
    out = convolve_step(
        inputs,
        weight,
        None,
        states,
        torch.tensor([3, -1, 1]),
        windows=windows,
        window_rows=torch.tensor([2, 0, -1]),
    )
    assert torch.equal(out[1], torch.zeros(5, DIM))
    for row, slot in ((0, 3), (2, 1)):
        torch.testing.assert_close(out[row], plain(before[slot].t(), inputs[row], weight))
        assert torch.equal(states[slot], inputs[row, -(WIDTH - 1) :].t())
    history = torch.cat((before[3].t(), inputs[0]))
    for t in range(5):
        assert torch.equal(windows[2, t], history[t + 1 : t + WIDTH].t())
    for row in (0, 1, 3):
        assert torch.equal(windows[row], torch.zeros(5, DIM, WIDTH - 1))
    for slot in (0, 2):
        assert torch.equal(states[slot], before[slot])
