"""What a DSpark draft is trained on: blocks at anchors of a sequence, against the target's distributions.

Per position k of a block, weighted exp(-k / 4): 0.1 cross entropy + 0.9 L1 distance of the distributions +
binary cross entropy of the confidence against the chance of acceptance, 1 - L1 / 2.

Source: DSpark (arXiv 2607.05147), section on training.
"""

from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from model.training.network import Network
from speculative.network import DraftNetwork

CROSS_ENTROPY_WEIGHT: Final = 0.1
DISTANCE_WEIGHT: Final = 0.9
DECAY_POSITIONS: Final = 4.0


@dataclass(frozen=True, slots=True)
class Anchors:
    """Where blocks begin: `at` [B, N] positions, `is_used` [B, N] which of them count."""

    at: Tensor
    is_used: Tensor

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(self.at.to(device), self.is_used.to(device))


def draw_anchors(written: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Draw `count` anchors a sequence; an anchor's next token is written by the assistant.

    Args:
        written: [B, S] bool on the CPU, which tokens the assistant wrote.
        count: N.
        generator: of the CPU.
    """
    fits = torch.zeros_like(written)
    fits[:, 1:-1] = written[:, 2:]  # the first token has no context
    order = torch.rand(fits.shape, generator=generator).masked_fill(~fits, 2.0).argsort(1)[:, :count]
    return Anchors(order, fits.gather(1, order))


def block_mask(anchors: Anchors, length: int, block: int) -> Tensor:
    """Which of the `length` context positions and of all block tokens each block token sees.

    Returns:
        [B, 1, N * block, length + N * block] bool: the context before its anchor, and its own block.
    """
    queries = anchors.at.shape[1] * block
    device = anchors.at.device
    owner = torch.arange(queries, device=device) // block
    context = torch.arange(length, device=device) < anchors.at[:, owner].unsqueeze(-1)
    own = (owner.unsqueeze(1) == owner).expand(len(anchors.at), -1, -1)
    return torch.cat((context, own), -1).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a draft said: hidden states, logits and confidence logits, and which positions count."""

    hidden: Tensor
    logits: Tensor
    confidence: Tensor
    labels: Tensor
    is_counted: Tensor


def run_blocks(
    network: DraftNetwork, target: Network, ids: Tensor, written: Tensor, features: Tensor, anchors: Anchors
) -> Blocks:
    """Run all blocks, with the true token before every position.

    Args:
        network: the draft.
        target: whose embedding and output head are used.
        ids, written: [B, S].
        features: [B, S, taps * hidden].
        anchors: N a sequence.

    Returns:
        Tensors [B, N, block, ...]; a position counts while all labels up to it are the assistant's.
    """
    length = ids.shape[1]
    block = network.config.block_size
    offset = torch.arange(block, device=ids.device)
    tokens = torch.full((*anchors.at.shape, block), network.config.mask_token, device=ids.device)
    tokens[..., 0] = ids.gather(1, anchors.at)
    positions = (anchors.at.unsqueeze(-1) + offset).flatten(1)
    embedded = target.model.embed_tokens(tokens.flatten(1))
    hidden = network(embedded, positions, features, block_mask(anchors, length, block))
    hidden = hidden.unflatten(1, (-1, block))
    after = anchors.at.unsqueeze(-1) + 1 + offset
    inside = after.clamp(max=length - 1)
    labels = ids.gather(1, inside.flatten(1)).view_as(after)
    counted = (after < length) & written.gather(1, inside.flatten(1)).view_as(after)
    counted = (counted & anchors.is_used.unsqueeze(-1)).int().cumprod(-1).bool()
    previous = torch.cat((tokens[..., :1], labels[..., :-1]), -1)
    codes = network.codes(previous)
    logits = target.lm_head(hidden).float() + network.bias(codes).float()
    return Blocks(hidden, logits, network.confidence(hidden, codes).float(), labels, counted)


def objective(
    blocks: Blocks, anchors: Anchors, target: Network, last: Tensor, temperature: float
) -> tuple[Tensor, dict[str, float]]:
    """The loss, and what to log: its parts and the accept length that the true prefixes would give.

    `last` [B, S, hidden] are the target's final hidden states; its distribution is taken at `temperature`.
    """
    length, block = last.shape[1], blocks.labels.shape[-1]
    offset = torch.arange(block, device=last.device)
    at = (anchors.at.unsqueeze(-1) + offset).clamp(max=length - 1)
    picked = last.gather(1, at.flatten(1).unsqueeze(-1).expand(-1, -1, last.shape[-1]))
    with torch.no_grad():
        wanted = (target.lm_head(picked).float() / temperature).softmax(-1).unflatten(1, (-1, block))
    found = (blocks.logits / temperature).softmax(-1)
    distance = (found - wanted).abs().sum(-1)
    chance = (1 - distance / 2).clamp(0, 1).detach()
    weight = blocks.is_counted * torch.exp(-offset / DECAY_POSITIONS)
    total = weight.sum().clamp(min=1e-6)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / total

    cross_entropy = mean(
        F.cross_entropy(blocks.logits.flatten(0, 2), blocks.labels.flatten(), reduction="none").view_as(
            weight
        )
    )
    confidence = mean(F.binary_cross_entropy_with_logits(blocks.confidence, chance, reduction="none"))
    loss = CROSS_ENTROPY_WEIGHT * cross_entropy + DISTANCE_WEIGHT * mean(distance) + confidence
    used = blocks.is_counted[..., 0]
    accepted = (chance * blocks.is_counted).cumprod(-1).sum(-1)
    return loss, {
        "loss": float(loss.detach()),
        "cross_entropy": float(cross_entropy.detach()),
        "distance": float(mean(distance).detach()),
        "confidence": float(confidence.detach()),
        "teacher_forced_length": float(1 + (accepted * used).sum() / used.sum().clamp(min=1)),
    }
