"""The router's balancing."""

import torch

from model.training.experts import quantile_correction


def test_balancing_evens_out_the_experts() -> None:
    scores = torch.sigmoid(
        torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8.0)
    )
    bias = torch.zeros(8)
    before = torch.bincount(scores.topk(2).indices.flatten(), minlength=8)
    for _ in range(20):
        bias = bias.lerp(quantile_correction(scores, bias, 2), 0.5)
    after = torch.bincount((scores + bias).topk(2).indices.flatten(), minlength=8)
    assert before.max() > 3000
    assert after.min() > 900 and after.max() < 1150
