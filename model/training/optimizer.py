"""Muon for the matrices, Adam for everything else.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/): the momentum of a matrix is replaced by the
nearest semi-orthogonal matrix before it is applied. Matrices of one shape are treated in one batch.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of the quintic iteration; from the page above
_ITERATIONS: Final = 5
_NOT_MATRICES: Final = ("embed_tokens", "lm_head", "conv1d", "res_proj", "gate.weight", ".b_proj")


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearly semi-orthogonal matrices with the singular vectors of the given ones, [N, rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if is_tall else x


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates at the peak of the schedule."""

    matrix: float = 0.02
    embedding: float = 0.006
    other: float = 0.002
    matrix_decay: float = 0.1


class Optimizer:
    """Updates a network's parameters; `scale` of `step` is the schedule."""

    def __init__(self, network: nn.Module, rates: Rates, momentum: float = 0.95) -> None:
        self.rates = rates
        self._momentum = momentum
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        embeddings: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in network.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.ndim >= 2 and not any(part in name for part in _NOT_MATRICES):
                self._groups[tuple(weight.shape[-2:])].append(weight)
            else:
                (embeddings if "embed_tokens" in name else others).append(weight)
        self._velocity = {shape: torch.zeros_like(_stack(weights)) for shape, weights in self._groups.items()}
        self._others = [*embeddings, *others]
        device = self._others[0].device
        self._adam = torch.optim.AdamW(
            [{"params": embeddings, "rate": rates.embedding}, {"params": others, "rate": rates.other}],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=device.type == "cuda",
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients with the peak rates times `scale`, and clear them."""
        rate, decay = self.rates.matrix * scale, self.rates.matrix_decay
        for shape, weights in self._groups.items():
            gradient = _stack(weight.grad for weight in weights if weight.grad is not None)
            velocity = self._velocity[shape]
            velocity.lerp_(gradient, 1 - self._momentum)
            update = orthogonalise(gradient.lerp_(velocity, self._momentum)).float()
            update *= rate * max(1.0, shape[0] / shape[1]) ** 0.5
            at = 0
            for weight in weights:
                count = weight.numel() // (shape[0] * shape[1])
                weight.mul_(1 - rate * decay).sub_(update[at : at + count].view_as(weight))
                at += count
        nn.utils.clip_grad_norm_(self._others, 1.0)
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * scale
        self._adam.step()
        for weight in (*self._others, *(w for weights in self._groups.values() for w in weights)):
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on exactly."""
        return {"velocity": dict(self._velocity), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for shape, velocity in self._velocity.items():
            velocity.copy_(state["velocity"][shape])
        self._adam.load_state_dict(state["adam"])


def _stack(weights: Iterable[Tensor]) -> Tensor:
    return torch.cat([weight.reshape(-1, *weight.shape[-2:]) for weight in weights])
