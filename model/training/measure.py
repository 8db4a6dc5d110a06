"""Losses by kind, held-out accuracy, and how much arithmetic a token costs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.training.documents import WEIGHTS, WRITTEN, Kind
from model.training.experts import LatentMoe
from model.training.feed import Batch
from model.training.geometry import Geometry
from model.training.network import Network

H200_FLOPS = 989e12
"""Dense bfloat16, by the vendor's data sheet."""


def losses(network: Network, ids: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token, [B * T] float32."""
    hidden, _ = network(ids)
    return F.cross_entropy(network.lm_head(hidden).float(), targets.flatten(), reduction="none")


def kind_weights(device: torch.device) -> Tensor:
    """Loss weight by kind."""
    return torch.tensor([WEIGHTS[kind] for kind in Kind], device=device)


def by_kind(values: Tensor, kinds: Tensor) -> dict[str, float]:
    """Mean of the values [T] over the tokens of each kind [T] that occurs."""
    sums = torch.zeros(len(Kind), device=values.device).index_add_(0, kinds, values.float())
    counts = torch.bincount(kinds, minlength=len(Kind))
    means = (sums / counts.clamp(min=1)).tolist()
    return {kind.name.lower(): round(means[kind], 4) for kind in Kind if counts[kind] > 0}


def to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [B, T], targets [B, T] and the targets' kinds [B * T]."""
    ids = torch.from_numpy(batch.ids).to(device, non_blocking=True).long()
    kinds = torch.from_numpy(batch.kinds).to(device, non_blocking=True).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), kinds[:, 1:].flatten()


def held_out(network: Network, batches: Sequence[Batch], device: torch.device) -> dict[str, Any]:
    """Loss and greedy accuracy on held-out sessions, with the true text before every token.

    `messages` is the share of assistant messages that greedy decoding would write exactly, given the true
    conversation before them; `call_messages` and `answers` are those with calls and without. Messages with a
    free choice count for nothing.
    """
    loss = torch.zeros((), device=device)
    right: list[Tensor] = []
    all_kinds: list[Tensor] = []
    exact: list[tuple[bool, bool]] = []
    for batch in batches:
        ids, targets, kinds = to_device(batch, device)
        # With gradients, though nothing needs them: without, every part would be compiled a second time.
        hidden, _ = network(ids)
        logits = network.lm_head(hidden.detach()).detach().float()
        loss += F.cross_entropy(logits, targets.flatten())
        correct = logits.argmax(-1) == targets.flatten()
        right.append(correct)
        all_kinds.append(kinds)
        exact += _messages(correct.view(ids.shape).cpu().numpy(), batch.kinds[:, 1:])
    calls = [ok for ok, has_calls in exact if has_calls]
    answers = [ok for ok, has_calls in exact if not has_calls]
    return {
        "loss": round(float(loss) / len(batches), 4),
        "accuracy": by_kind(torch.cat(right), torch.cat(all_kinds)),
        "messages": _share([ok for ok, _ in exact]),
        "call_messages": _share(calls),
        "answers": _share(answers),
        "counted": len(exact),
    }


def _share(found: Sequence[bool]) -> float:
    return round(sum(found) / max(1, len(found)), 4)


def _messages(correct: NDArray[np.bool_], kinds: NDArray[np.uint8]) -> list[tuple[bool, bool]]:
    """For each whole assistant message without a free choice: is it right, does it call."""
    found: list[tuple[bool, bool]] = []
    written = np.isin(kinds, [int(kind) for kind in WRITTEN])
    for row in range(len(kinds)):
        edges = np.flatnonzero(np.diff(written[row].astype(np.int8), prepend=0))
        for start, end in zip(edges[::2], edges[1::2], strict=False):
            own = kinds[row, start:end]
            if not (own == Kind.CHOICE).any():
                found.append((bool(correct[row, start:end].all()), bool((own == Kind.CALL).any())))
    return found


def flops_per_token(network: Network, geometry: Geometry, length: int) -> float:
    """Floating point operations that training a token takes, experts that are not chosen left out.

    Six per weight in a product; attention and KDA as their products say (three times the forward pass).
    """
    weights = 0.0
    for name, weight in network.named_parameters():
        if weight.ndim < 2 or "embed_tokens" in name:
            continue
        is_routed = name.rpartition(".")[2] in ("w1", "w2", "w3")
        weights += weight.numel() * (
            geometry.num_experts_per_token / geometry.num_experts if is_routed else 1
        )
    full = len(geometry.full_attention_layers)
    width = 2 * (geometry.qk_nope_head_dim + geometry.qk_rope_head_dim + geometry.v_head_dim)
    attention = full * geometry.num_attention_heads * width * length / 2
    size = geometry.kda_head_dim
    kda = (geometry.num_hidden_layers - full) * geometry.kda_heads * (6 * size * size + 4 * 64 * size)
    return 6 * weights + 3 * (attention + kda)


def moe_load(network: Network) -> float:
    """Largest share of the tokens that one expert of any layer takes, over the even share."""
    worst = 0.0
    for layer in network.layers:
        if isinstance(moe := layer.feed_forward, LatentMoe) and moe.scores is not None:
            chosen = (moe.scores + moe.gate.e_score_correction_bias).topk(
                moe.geometry.num_experts_per_token, -1
            )
            counts = torch.bincount(chosen.indices.flatten(), minlength=moe.geometry.num_experts)
            worst = max(worst, float(counts.max() / counts.sum() * moe.geometry.num_experts))
    return round(worst, 3)
