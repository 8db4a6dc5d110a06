"""How many tokens a draft's proposals gain on a given text: greedy proposals, walked as a server does.

A proposal does not depend on how the walk came to its anchor, so all anchors are run at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.training.documents import WRITTEN, Kind
from model.training.network import Network
from speculative.network import DraftNetwork
from speculative.objective import Anchors, block_mask

_ANCHORS_AT_ONCE: Final = 256


@torch.no_grad()
def propose(network: DraftNetwork, target: Network, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """The tokens that the draft proposes after each anchor, greedily.

    Args:
        network, target: the draft, and whose embedding and output head it uses.
        ids: [S].
        features: [S, taps * hidden].
        anchors: [N] positions.

    Returns:
        [N, block].
    """
    block = network.config.block_size
    offset = torch.arange(block, device=ids.device)
    found: list[Tensor] = []
    for at in anchors.split(_ANCHORS_AT_ONCE):
        tokens = torch.full((len(at), block), network.config.mask_token, device=ids.device)
        tokens[:, 0] = ids[at]
        mask = block_mask(Anchors(at[None], torch.ones_like(at[None], dtype=torch.bool)), len(ids), block)
        positions = (at[:, None] + offset).flatten()[None]
        hidden = network(target.model.embed_tokens(tokens.flatten()[None]), positions, features[None], mask)
        base = target.lm_head(hidden[0]).float().unflatten(0, (-1, block))
        previous, proposed = tokens[:, 0], torch.empty_like(tokens)
        for k in range(block):
            previous = (base[:, k] + network.bias(network.codes(previous)).float()).argmax(-1)
            proposed[:, k] = previous
        found.append(proposed)
    return torch.cat(found)


@dataclass(slots=True)
class Tally:
    """Rounds of a walk, and how many of their proposals were accepted."""

    rounds: int = 0
    accepted: int = 0
    survived: list[int] = field(default_factory=list[int])
    """How many rounds accepted at least 1, 2, ... tokens."""
    by_kind: dict[Kind, list[int]] = field(default_factory=dict[Kind, list[int]])
    """[Rounds, accepted] by the kind of a round's first token."""

    def add(self, accepted: int, block: int, kind: Kind) -> None:
        """Count a round."""
        self.survived = self.survived or [0] * block
        self.rounds += 1
        self.accepted += accepted
        for k in range(accepted):
            self.survived[k] += 1
        counts = self.by_kind.setdefault(kind, [0, 0])
        counts[0] += 1
        counts[1] += accepted

    @property
    def length(self) -> float:
        """Accept length: tokens a round, the target's own included."""
        return 1 + self.accepted / max(1, self.rounds)

    def to_json(self) -> dict[str, Any]:
        """Accept length over all, by kind, and the share of rounds that accepted 1, 2, ... tokens."""
        return {
            "accept_length": round(self.length, 3),
            "rounds": self.rounds,
            "survival": [round(count / max(1, self.rounds), 3) for count in self.survived],
            "by_kind": {
                kind.name.lower(): round(1 + accepted / rounds, 3)
                for kind, (rounds, accepted) in sorted(self.by_kind.items())
            },
        }


def walk(
    tally: Tally, ids: NDArray[Any], kinds: NDArray[Any], proposals: Mapping[int, Sequence[int]]
) -> None:
    """Decode every answer in the text [S] from its first token on, as a server that drafts does.

    `proposals` are those at each anchor. What a block proposes beyond the answer's end counts for nothing.
    """
    written = np.isin(kinds, [int(kind) for kind in WRITTEN])
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
            tally.add(accepted, len(proposed), Kind(int(kinds[at + 1])))
            at += accepted + 1


def measure(
    network: DraftNetwork, target: Network, ids: NDArray[Any], kinds: NDArray[Any], tally: Tally
) -> None:
    """Walk one text [S], S a multiple of 64, and count into `tally`."""
    device = target.lm_head.weight.device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    with torch.no_grad():
        _, taps = target(tokens[None], network.config.target_layers)
    written = np.flatnonzero(np.isin(kinds, [int(kind) for kind in WRITTEN]))
    anchors = written[written > 0]
    features = torch.cat(taps, -1)
    proposed = propose(network, target, tokens, features, torch.from_numpy(anchors).to(device))
    walk(tally, ids, kinds, dict(zip(anchors.tolist(), proposed.tolist(), strict=True)))
