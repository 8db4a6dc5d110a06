"""Lengths of the batches and the scale of the learning rates, by progress from 0 to 1."""

from random import Random
from typing import Final

_STAGES: Final = (
    # until, ((length, weight), ...)
    (0.12, ((1024, 1.0),)),
    (0.35, ((1024, 0.4), (2048, 0.6))),
    (0.70, ((1024, 0.1), (2048, 0.5), (4096, 0.4))),
    (0.85, ((2048, 0.4), (4096, 0.3), (8192, 0.3))),
    (1.00, ((2048, 0.3), (4096, 0.2), (8192, 0.2), (16384, 0.2), (32768, 0.1))),
)
_WARM_UP: Final = 0.01
_DECAY_FROM: Final = 0.45
_LAST_SCALE: Final = 0.02


def length(seed: int, index: int, progress: float, longest: int) -> int:
    """Tokens of the sequences of batch `index`: short ones first, up to 32,768 at the end."""
    choices = next(choices for until, choices in _STAGES if progress < until or until == 1)
    lengths, weights = zip(*choices, strict=True)
    return min(longest, Random(f"{seed}/length/{index}").choices(lengths, weights)[0])


def scale(progress: float) -> float:
    """Factor of the peak learning rates: a short rise, level, then linear down."""
    if progress < _WARM_UP:
        return max(progress / _WARM_UP, 0.01)
    if progress < _DECAY_FROM:
        return 1.0
    return _LAST_SCALE + (1 - _LAST_SCALE) * max(0.0, 1 - progress) / (1 - _DECAY_FROM)
