"""Depthwise causal convolution over the tokens of each sequence, with a carried window.

Kimi Delta Attention runs a short convolution of width W (4) over its projected q, k and v
(Kimi Linear, arXiv 2510.26692, section 3). A sequence's state is the window of its last W - 1 inputs.

Sums run over the taps in one fixed order, element by element, so an output depends on the W inputs of its
own sequence alone: never on the batch, the chunk length or where a prefix was cut.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None, activate: bool) -> Tensor:
    """Convolve ``window`` [..., T + W - 1, dim] with ``weight`` [dim, W] into [..., T, dim]."""
    width = weight.shape[1]
    count = window.shape[-2] - width + 1
    taps = weight.t().contiguous()
    out = window.narrow(-2, 0, count) * taps[0]
    if bias is not None:
        out += bias
    for j in range(1, width):
        out.addcmul_(window.narrow(-2, j, count), taps[j])
    return F.silu(out, inplace=True) if activate else out


def convolve_sequences(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    lengths: Sequence[int],
    slots: Sequence[int],
    continued: Sequence[bool],
    *,
    activate: bool = True,
) -> Tensor:
    """Convolve packed sequences and leave each one's last window in ``states``.

    Args:
        inputs: [T, dim], the sequences one after another.
        weight: [dim, W]; the last tap multiplies the newest input.
        bias: [dim] or None.
        states: [slots, dim, W - 1], oldest input first; any strides. Written in place.
        lengths: tokens of each sequence; their sum is at most T.
        slots: row of ``states`` for each sequence; a negative one skips the sequence (output zero).
        continued: whether the window starts from the state (True) or from zeros.
        activate: apply SiLU.

    Returns:
        [T, dim] in the dtype of ``inputs``.
    """
    width = weight.shape[1]
    out = torch.zeros_like(inputs)
    start = 0
    for length, slot, cont in zip(lengths, slots, continued, strict=True):
        end = start + length
        if length > 0 and slot >= 0:
            state = states[slot]
            old = state[:, -(width - 1) :].t().to(inputs.dtype)
            history = old if cont else torch.zeros_like(old)
            window = torch.cat((history, inputs[start:end]), dim=0)
            out[start:end] = _taps(window.float(), weight.float(), bias, activate)
            state.copy_(window[-(width - 1) :].t())
        start = end
    return out


def convolve_step(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    *,
    activate: bool = True,
    windows: Tensor | None = None,
    window_rows: Tensor | None = None,
) -> Tensor:
    """Advance every sequence of a batch by the same small number of tokens.

    Args:
        inputs: [B, T, dim].
        weight: [dim, W].
        bias: [dim] or None.
        states: [slots, dim, W - 1]; advanced by T tokens in place.
        slots: [B] rows of ``states``; a negative one is padding and yields zeros.
        activate: apply SiLU.
        windows: [rows, T, dim, W - 1] that receives the window after each token, so that a verified draft
            can be rolled back to any of its tokens; None to keep none.
        window_rows: [B] rows of ``windows``; a negative one keeps none.

    Returns:
        [B, T, dim] in the dtype of ``inputs``.
    """
    width, tokens = weight.shape[1], inputs.shape[1]
    live = slots >= 0
    if not bool(live.all()):
        out = torch.zeros_like(inputs)
        rows = live.nonzero().squeeze(1)
        if rows.numel():
            out[rows] = convolve_step(
                inputs[rows],
                weight,
                bias,
                states,
                slots[rows],
                activate=activate,
                windows=windows,
                window_rows=None if window_rows is None else window_rows[rows],
            )
        return out
    index = slots.long()
    history = states[index][..., -(width - 1) :].transpose(1, 2).to(inputs.dtype)
    window = torch.cat((history, inputs), dim=1)
    states[index] = window[:, -(width - 1) :].transpose(1, 2).to(states.dtype)
    if windows is not None and window_rows is not None:
        kept = (window_rows >= 0).nonzero().squeeze(1)
        after = window.unfold(1, width - 1, 1)[kept, 1:]  # [kept, T, dim, W - 1]
        windows[window_rows[kept].long(), :tokens] = after.to(windows.dtype)
    return _taps(window.float(), weight.float(), bias, activate).to(inputs.dtype)
