"""How many tokens a draft's proposals gain on a given text: greedy proposals, walked as a server does."""

from collections.abc import Callable, Sequence
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


class Proposer:
    """A draft over one text."""

    @torch.no_grad()
    def __init__(self, network: DraftNetwork, target: Network, ids: Tensor, features: Tensor) -> None:
        """Take a text.

        Args:
            network, target: the draft, and whose embedding and output head it uses.
            ids: [S].
            features: [S, taps * hidden].
        """
        self._network = network
        self._target = target
        self._ids = ids
        self._contexts = network.contexts(features[None])

    @torch.no_grad()
    def __call__(self, anchors: Tensor) -> Proposals:
        """The tokens that the draft proposes after each anchor [N], greedily."""
        network, target, ids = self._network, self._target, self._ids
        block = network.config.block_size
        offset = torch.arange(block, device=ids.device)
        # No anchor sees what stands behind the last of them. (Kernels want whole eights.)
        seen = min(len(ids), -(-int(anchors.max()) // 8) * 8)
        contexts = [(k[:, :, :seen], v[:, :, :seen]) for k, v in self._contexts]
        tokens = torch.full((len(anchors), block), network.config.mask_token, device=ids.device)
        tokens[:, 0] = ids[anchors]
        mask = block_mask(
            Anchors(anchors[None], torch.ones_like(anchors[None], dtype=torch.bool)), seen, block
        )
        positions = (anchors[:, None] + offset).flatten()[None]
        embedded = target.model.embed_tokens(tokens.flatten()[None])
        hidden = network.run(embedded, positions, contexts, mask)[0].unflatten(0, (-1, block))
        base = target.lm_head(hidden).float()
        previous, proposed = tokens[:, 0], torch.empty_like(tokens)
        sure = torch.empty_like(base[..., 0])
        for k in range(block):
            codes = network.codes(previous)
            sure[:, k] = network.confidence(hidden[:, k], codes).float()
            previous = (base[:, k] + network.bias(codes).float()).argmax(-1)
            proposed[:, k] = previous
        return Proposals(proposed, sure)


@dataclass(frozen=True, slots=True)
class Round:
    """A block drafted behind the token `at`: how many of its `countable` positions (those in the message)
    were `accepted`, how many tokens were `gained` with the target's own, and how sure the draft was."""

    at: int
    accepted: int
    countable: int
    gained: int
    confidence: tuple[float, ...]

    def __post_init__(self) -> None:
        assert 0 <= self.accepted <= self.countable <= len(self.confidence) and self.gained > 0


@dataclass(slots=True)
class Tally:
    """Rounds of a walk, and how many tokens of the text they gave."""

    rounds: int = 0
    gained: int = 0
    survived: list[int] = field(default_factory=list[int])
    """How many rounds accepted at least 1, 2, ... tokens."""
    by_segment: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """[Rounds, gained] by what a round's first token belongs to."""

    def add(self, found: Round, segments: Sequence[str]) -> None:
        """Count a round, whose first token belongs to `segments`."""
        self.survived = self.survived or [0] * len(found.confidence)
        self.rounds += 1
        self.gained += found.gained
        for k in range(found.accepted):
            self.survived[k] += 1
        for segment in segments:
            counts = self.by_segment.setdefault(segment, [0, 0])
            counts[0] += 1
            counts[1] += found.gained

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


Propose = Callable[[list[int]], Proposals]


def _messages(written: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First anchor and end of each message in which there is something to draft. (The first token of all has
    no context.)"""
    edges = np.flatnonzero(np.diff(written.astype(np.int8), prepend=0, append=0))
    pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [(max(1, start), end) for start, end in pairs if max(1, start) + 1 < end]


def _rounds(ids: NDArray[Any], places: Sequence[tuple[int, int]], propose: Propose) -> list[Round]:
    """A round at each place: an anchor, and the end of its message."""
    proposals = propose([at for at, _ in places])
    found: list[Round] = []
    triples = zip(places, proposals.tokens.tolist(), proposals.confidence.tolist(), strict=True)
    for (at, end), proposed, sure in triples:
        accepted = 0
        countable = min(len(proposed), end - 1 - at)
        while accepted < countable and proposed[accepted] == ids[at + 1 + accepted]:
            accepted += 1
        found.append(Round(at, accepted, countable, min(accepted + 1, end - 1 - at), tuple(sure)))
    return found


def walk(ids: NDArray[Any], written: NDArray[np.bool_], propose: Propose) -> list[Round]:
    """Decode every message in the text [S] from its first token on, as a server that drafts does.

    All messages at once: their next rounds are proposed together.
    """
    active = _messages(written)
    found: list[Round] = []
    while active:
        latest = _rounds(ids, active, propose)
        found += latest
        pairs = zip(latest, active, strict=True)
        following = [(taken.at + taken.gained, end) for taken, (_, end) in pairs]
        active = [(at, end) for at, end in following if at + 1 < end]
    return found


def everywhere(ids: NDArray[Any], written: NDArray[np.bool_], propose: Propose) -> list[Round]:
    """A round behind every token of the messages, whether a server would draft there or not."""
    places = [(at, end) for start, end in _messages(written) for at in range(start, end - 1)]
    chunks = [places[n : n + _ANCHORS_AT_ONCE] for n in range(0, len(places), _ANCHORS_AT_ONCE)]
    return [taken for chunk in chunks for taken in _rounds(ids, chunk, propose)]


@dataclass(frozen=True, slots=True)
class Measured:
    """The rounds of a walk, and which of the written tokens (but one that begins the text) are the target's
    likeliest."""

    rounds: Sequence[Round]
    is_greedy: NDArray[np.bool_]


@torch.no_grad()
def measure(
    network: DraftNetwork,
    target: Network,
    ids: NDArray[Any],
    written: NDArray[np.bool_],
    rounds: Callable[[NDArray[Any], NDArray[np.bool_], Propose], list[Round]] = walk,
) -> Measured:
    """Walk one text [S], of which the target wrote some tokens (or draft `everywhere`)."""
    device = target.lm_head.weight.device
    length = len(ids) + -len(ids) % CHUNK_TOKENS
    tokens = torch.zeros(length, dtype=torch.long, device=device)
    tokens[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    last, taps = target(tokens[None], network.config.target_layers)
    places = np.flatnonzero(written[1:])  # each before a token that was written
    likeliest = target.lm_head(last[torch.from_numpy(places).to(device)]).argmax(-1).cpu().numpy()
    proposer = Proposer(network, target, tokens, torch.cat(taps, -1))
    found = rounds(ids, written, lambda anchors: proposer(torch.tensor(anchors, device=device)))
    return Measured(found, likeliest == ids[1:][places])
