"""Batches drawn by worker processes ahead of the trainer."""

import multiprocessing
import traceback
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.tokenizer import K3Tokenizer
from model.training import documents


class Batch(NamedTuple):
    """Ids `[B, length + 1]` and the kind of each (`documents.Kind`)."""

    ids: NDArray[np.int16]
    kinds: NDArray[np.uint8]


# Added to the seed for a batch whose drawing failed: a rare fault of a task ends no run of many minutes.
_REDRAW = 1_000_003


class DrawError(RuntimeError):
    """A batch that can't be drawn."""


def _work(tokenizer_json: str, seed: int, tokens: int, wanted: Any, drawn: Any) -> None:
    encoder = documents.Encoder(K3Tokenizer.from_json(tokenizer_json))
    while (request := wanted.get()) is not None:
        index, length = request
        for attempt in (seed, seed + _REDRAW):
            try:
                drawn.put((index, Batch(*documents.batch(attempt, index, length, tokens, encoder))))
                break
            except Exception:
                traceback.print_exc()
        else:
            drawn.put((index, None))


class Feed:
    """Draws batches in `workers` processes; a batch depends on the seed, its index and its length alone."""

    def __init__(self, tokenizer_json: str, seed: int, tokens: int, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._wanted = context.Queue()
        self._drawn = context.Queue()
        arguments = (tokenizer_json, seed, tokens, self._wanted, self._drawn)
        self._workers: list[BaseProcess] = [
            context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._early: dict[int, Batch] = {}

    def request(self, index: int, length: int) -> None:
        """Have a batch drawn."""
        self._wanted.put((index, length))

    def take(self, index: int) -> Batch:
        """Wait for a batch that was requested. Raises `DrawError`, or `queue.Empty` after five minutes."""
        while index not in self._early:
            number, drawn = self._drawn.get(timeout=300)
            if drawn is None:
                raise DrawError(f"batch {number} can't be drawn; a worker's traceback is on stderr")
            self._early[number] = drawn
        return self._early.pop(index)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()
        for queue in (self._wanted, self._drawn):
            queue.cancel_join_thread()
