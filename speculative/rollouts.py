"""What a target writes itself in agent sessions: the text that its draft is trained and measured on.

A sequence begins as the script plays a session; its last tokens are a rollout: the target's messages are
drawn at the serving temperature, its calls are executed, and what users ask and tools answer is put between.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from model.tasks.lexicon import Split
from model.tokenizer import K3Tokenizer
from model.training import delta
from model.training.network import Network
from speculative.decoding import Decoder, graphed
from speculative.players import Players, Request

_BLOCK_STEPS: Final = 16
"""Steps between two looks at which messages ended."""
_MOST_STEPS: Final = 3
"""Steps of a round for each token that it rolls out: those that wait for others are dropped then."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Texts `ids` [N, L] int16; `written` [N, L] bool tells which tokens the target drew."""

    ids: NDArray[np.int16]
    written: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.ids.shape == self.written.shape

    def joined(self, other: Self) -> Self:
        """These and others of the same length."""
        pairs = ((self.ids, other.ids), (self.written, other.written))
        return type(self)(*(np.concatenate(pair) for pair in pairs))  # pyright: ignore[reportArgumentType]


class Roller:
    """Draws rollouts of one target."""

    def __init__(
        self,
        target: Network,
        tokenizer_json: str,
        workers: int,
        note: Callable[[str], None],
    ) -> None:
        self._target = target
        self._note = note
        self._ends = K3Tokenizer.from_json(tokenizer_json).eos_ids
        self._players = Players(tokenizer_json, workers)
        self._on_gpu = target.lm_head.weight.is_cuda

    def close(self) -> None:
        """End the processes."""
        self._players.close()

    def roll(
        self, seed: str, count: int, length: int, rolled: int, *, split: Split, temperature: float
    ) -> Rollouts:
        """Draw up to `count` texts of `length` tokens, the last `rolled` of them rolled out.

        Texts that wait too long for their end are left out.
        """
        began = time.monotonic()
        chunk = delta.CHUNK_TOKENS
        prefilled = max(chunk, (length - rolled) // chunk * chunk)
        requests = [Request(f"{seed}/{split}/{length}/{n}", split, prefilled + 1) for n in range(count)]
        decoder = Decoder(self._target, count, length, temperature, self._ends)
        decoder.begin(self._players.begin(requests), prefilled)
        filled = time.monotonic()
        # Where each text's current message began.
        starts: list[int] = decoder.known.tolist()
        step = graphed(decoder.step, self._note) if self._on_gpu else decoder.step
        steps = 0
        while steps < _MOST_STEPS * (length - prefilled):
            for _ in range(_BLOCK_STEPS):
                step()
            steps += _BLOCK_STEPS
            at, known, is_waiting = torch.stack(
                (decoder.at, decoder.known, decoder.is_waiting.long())
            ).tolist()
            if min(at) >= length - 1:
                break
            ended = [n for n in range(count) if is_waiting[n] and known[n] < length]
            if not ended:
                continue
            window = min(starts[n] for n in ended)
            text = decoder.text[torch.tensor(ended, device=decoder.text.device), window:].cpu().numpy()
            written = {
                n: text[row, starts[n] - window : known[n] - window].tolist() for row, n in enumerate(ended)
            }
            answers = self._players.answer(written)
            decoder.give(answers)
            for n, ids in answers.items():
                starts[n] = known[n] + len(ids)
        is_whole = (decoder.known >= length).cpu().numpy()
        found = Rollouts(
            decoder.text.cpu().numpy().astype(np.int16)[is_whole], decoder.written.cpu().numpy()[is_whole]
        )
        seconds = time.monotonic() - began
        self._note(
            f"rolled out {len(found.ids)} of {count} texts of {length} tokens, {int(found.written.sum())}"
            f" written, in {seconds:.1f} s ({filled - began:.1f} s to fill, {steps} steps)"
        )
        return found


@contextmanager
def roller(
    target: Network, tokenizer_json: str, workers: int, note: Callable[[str], None]
) -> Generator[Roller]:
    """A `Roller` whose processes end with the block."""
    made = Roller(target, tokenizer_json, workers, note)
    try:
        yield made
    finally:
        made.close()


class Pool:
    """Rollouts by length."""

    def __init__(self) -> None:
        self.by_length: dict[int, Rollouts] = {}

    def add(self, rollouts: Rollouts) -> None:
        """Keep more."""
        if len(rollouts.ids):
            length = rollouts.ids.shape[1]
            known = self.by_length.get(length)
            self.by_length[length] = rollouts if known is None else known.joined(rollouts)

    @property
    def written(self) -> int:
        """How many tokens the target drew."""
        return sum(int(rollouts.written.sum()) for rollouts in self.by_length.values())

    def draw(self, generator: np.random.Generator, length: int, count: int) -> Rollouts:
        """Rows at random, without repetition where there are enough."""
        rollouts = self.by_length[length]
        rows = generator.choice(len(rollouts.ids), count, replace=count > len(rollouts.ids))
        return Rollouts(rollouts.ids[rows], rollouts.written[rows])

    def save(self, path: Path) -> None:
        """Write all to one file."""
        arrays: dict[str, NDArray[np.generic]] = {}
        for length, rollouts in self.by_length.items():
            arrays[f"ids_{length}"] = rollouts.ids
            arrays[f"written_{length}"] = rollouts.written
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **arrays)  # pyright: ignore[reportArgumentType] -- its stub takes one flag by name
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        pool = cls()
        with np.load(path) as arrays:
            for name in arrays.files:
                if name.startswith("ids_"):
                    length = name.removeprefix("ids_")
                    pool.add(Rollouts(arrays[name], arrays[f"written_{length}"]))
        return pool


def rounds(lengths: Sequence[int], tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """(Length, number of texts) of one round after another, without end; `tokens` at most at once."""
    while True:
        for length in lengths:
            yield length, max(1, min(most, tokens // length))
