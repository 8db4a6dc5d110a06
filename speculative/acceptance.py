"""How many tokens a draft's proposals gain on a given text: greedy proposals, walked as a server does.

A proposal does not depend on how the walk came to its anchor, so all anchors are run at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.training.delta import CHUNK_TOKENS
from model.training.network import Network
from speculative.network import DraftNetwork
from speculative.objective import Anchors, block_mask

_ANCHORS_AT_ONCE: Final = 256


class Proposals(NamedTuple):
    """Tokens proposed after N anchors, and the logits of how sure the draft is of each, both [N, block]."""

    tokens: Tensor
    confidence: Tensor


@torch.no_grad()
def propose(
    network: DraftNetwork, target: Network, ids: Tensor, features: Tensor, anchors: Tensor
) -> Proposals:
    """The tokens that the draft proposes after each anchor, greedily.

    Args:
        network, target: the draft, and whose embedding and output head it uses.
        ids: [S].
        features: [S, taps * hidden].
        anchors: [N] positions.
    """
    block = network.config.block_size
    offset = torch.arange(block, device=ids.device)
    found: list[Proposals] = []
    for at in anchors.split(_ANCHORS_AT_ONCE):
        # No anchor sees what stands behind the last of them. (Kernels want whole eights.)
        seen = min(len(ids), -(-int(at.max()) // 8) * 8) if len(at) else 0
        tokens = torch.full((len(at), block), network.config.mask_token, device=ids.device)
        tokens[:, 0] = ids[at]
        mask = block_mask(Anchors(at[None], torch.ones_like(at[None], dtype=torch.bool)), seen, block)
        positions = (at[:, None] + offset).flatten()[None]
        embedded = target.model.embed_tokens(tokens.flatten()[None])
        hidden = network(embedded, positions, features[None, :seen], mask)[0].unflatten(0, (-1, block))
        base = target.lm_head(hidden).float()
        previous, proposed = tokens[:, 0], torch.empty_like(tokens)
        sure = torch.empty_like(base[..., 0])
        for k in range(block):
            codes = network.codes(previous)
            sure[:, k] = network.confidence(hidden[:, k], codes).float()
            previous = (base[:, k] + network.bias(codes).float()).argmax(-1)
            proposed[:, k] = previous
        found.append(Proposals(proposed, sure))
    return Proposals(*(torch.cat(parts) for parts in zip(*found, strict=True)))


@dataclass(slots=True)
class Tally:
    """Rounds of a walk, and how many tokens of the text they gave."""

    rounds: int = 0
    gained: int = 0
    survived: list[int] = field(default_factory=list[int])
    """How many rounds accepted at least 1, 2, ... tokens."""
    by_segment: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """[Rounds, gained] by what a round's first token belongs to."""

    def add(self, accepted: int, gained: int, block: int, segments: Sequence[str]) -> None:
        """Count a round: proposals accepted, and with them the target's own token if the text has one."""
        self.survived = self.survived or [0] * block
        self.rounds += 1
        self.gained += gained
        for k in range(accepted):
            self.survived[k] += 1
        for segment in segments:
            counts = self.by_segment.setdefault(segment, [0, 0])
            counts[0] += 1
            counts[1] += gained

    @property
    def length(self) -> float:
        """Accept length: tokens a round, the target's own included."""
        return self.gained / max(1, self.rounds)

    def to_json(self) -> dict[str, Any]:
        """Accept length over all, by segment, and the share of rounds that accepted 1, 2, ... tokens."""
        return {
            "accept_length": round(self.length, 3),
            "rounds": self.rounds,
            "survival": [round(count / max(1, self.rounds), 3) for count in self.survived],
            "by_segment": {
                segment: {"accept_length": round(gained / rounds, 3), "rounds": rounds}
                for segment, (rounds, gained) in sorted(self.by_segment.items())
            },
        }


def walk(
    tallies: Sequence[Tally],
    ids: NDArray[Any],
    written: NDArray[np.bool_],
    segments: Sequence[Sequence[str]],
    proposals: Mapping[int, Sequence[int]],
) -> None:
    """Decode every answer in the text [S] from its first token on, as a server that drafts does.

    `proposals` are those at each anchor, `segments` what each token belongs to. What a block proposes beyond
    the answer's end counts for nothing.
    """
    edges = np.flatnonzero(np.diff(written.astype(np.int8), prepend=0, append=0))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        at = max(1, int(start))  # the first token of all has no context
        while at + 1 < end:
            proposed = proposals[at]
            accepted = 0
            while accepted < len(proposed) and at + 1 + accepted < end:
                if proposed[accepted] != ids[at + 1 + accepted]:
                    break
                accepted += 1
            gained = min(accepted + 1, int(end) - 1 - at)
            for tally in tallies:
                tally.add(accepted, gained, len(proposed), segments[at + 1])
            at += gained


@dataclass(frozen=True, slots=True)
class Measured:
    """A text as draft and target see it: anchors [N] among what was written, what is proposed there, and
    which of the written tokens (but one that begins the text) are the target's likeliest."""

    anchors: NDArray[np.int64]
    proposals: Proposals
    is_greedy: NDArray[np.bool_]


@torch.no_grad()
def run(network: DraftNetwork, target: Network, ids: NDArray[Any], written: NDArray[np.bool_]) -> Measured:
    """Run target and draft over one text [S]."""
    device = target.lm_head.weight.device
    length = len(ids) + -len(ids) % CHUNK_TOKENS
    tokens = torch.zeros(length, dtype=torch.long, device=device)
    tokens[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    last, taps = target(tokens[None], network.config.target_layers)
    places = np.flatnonzero(written[1:])  # each before a token that was written
    likeliest = target.lm_head(last[torch.from_numpy(places).to(device)]).argmax(-1).cpu().numpy()
    anchors = np.flatnonzero(written)
    anchors = anchors[anchors > 0]
    proposals = propose(network, target, tokens, torch.cat(taps, -1), torch.from_numpy(anchors).to(device))
    return Measured(anchors, proposals, likeliest == ids[1:][places])


def measure(
    network: DraftNetwork,
    target: Network,
    ids: NDArray[Any],
    written: NDArray[np.bool_],
    segments: Sequence[Sequence[str]],
    *tallies: Tally,
) -> Measured:
    """Walk one text [S] and count into the tallies."""
    measured = run(network, target, ids, written)
    proposed = measured.proposals.tokens.tolist()
    walk(tallies, ids, written, segments, dict(zip(measured.anchors.tolist(), proposed, strict=True)))
    return measured
