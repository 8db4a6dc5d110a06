"""The batched delta rule against its definition in float64."""

import pytest
import torch
from torch import Tensor

from model.training import delta


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: int) -> Tensor:
    length = q.shape[0] // batch
    outputs = []
    for start in range(0, q.shape[0], length):
        memory = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(start, start + length):
            memory = memory * g[t].exp().unsqueeze(-1)
            seen = (k[t].unsqueeze(1) @ memory).squeeze(1)
            write = beta[t].unsqueeze(-1) * (v[t] - seen)
            memory = memory + k[t].unsqueeze(-1) * write.unsqueeze(1)
            outputs.append((q[t].unsqueeze(1) @ memory).squeeze(1))
    return torch.stack(outputs)


# 1,024 tokens are 16 chunks, carried in four groups of four; 64 are a single one.
@pytest.mark.parametrize(("batch", "length"), [(1, 1024), (2, 192), (3, 64)])
def test_outputs_and_gradients(batch: int, length: int) -> None:
    torch.manual_seed(length)
    heads, width, value = 2, 16, 24
    tokens = batch * length

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    exact = [
        unit(torch.randn(tokens, heads, width)).double() * width**-0.5,
        # keys that resemble each other: the triangular system is far from the identity
        unit(torch.randn(tokens, heads, width) * 0.5 + torch.randn(1, heads, width)).double(),
        torch.randn(tokens, heads, value).double(),
        -5 * torch.sigmoid(torch.randn(tokens, heads, width).double() * 3 - 3),
        torch.sigmoid(torch.randn(tokens, heads).double() + 1),
    ]
    rounded = [x.float().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    parts = delta.prepare(*rounded)
    found = delta.finish(parts, delta.carry_over(parts, batch, heads), heads)
    expected = recurrence(*exact, batch)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight.double()).sum().backward()
    assert found.double().allclose(expected, atol=1e-5)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.double().allclose(theirs.grad, atol=2e-5 * float(theirs.grad.abs().max()))
