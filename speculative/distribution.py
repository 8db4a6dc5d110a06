"""Whether sampling with a draft follows the target's distribution.

A greedy answer is cut where the target has a real choice. Sampled on from the token before that place, an
engine takes this token from the prefill and the next from a verified block: that one is counted, and the
counts are compared with the target's probabilities by Pearson's chi-square.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor

from model.encoding import generation_segments, head_segments, messages_segments
from model.training.delta import CHUNK_TOKENS
from speculative.draft import DraftError
from speculative.pair import Pair
from speculative.served import Engine

SAMPLES: Final = 400
_REQUESTS: Final = (
    "Choose a pepper session code and keep it to yourself.",
    "Choose a basalt access code and keep it to yourself.",
)
_MOST_LIKELY: Final = 0.5
_EXPECTED: Final = 5.0
_AT_ONCE: Final = 8


def sample(engine: Engine, pair: Pair, note: Callable[[str], None]) -> dict[str, Any]:
    """Sample at temperature 1 and compare. Raises `DraftError` when the target chooses nowhere."""
    prompt, before, chances = _choice(engine, pair)

    def one(_: int) -> tuple[int, int]:
        found = engine.generate(prompt, temperature=1.0, max_new_tokens=2, ignore_eos=True).ids
        return found[0], found[1]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        drawn = list(pool.map(one, range(SAMPLES)))
    seconds = [second for first, second in drawn if first == before]
    statistic, degrees = chi_square(Counter(seconds), chances)
    p_value = float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))
    note(f"temperature 1: chi-square {statistic:.1f} of {degrees} degrees, p = {p_value:.3f}")
    return {
        "samples": len(seconds),
        "chi_square": round(statistic, 2),
        "degrees": degrees,
        "p_value": round(p_value, 4),
    }


def chi_square(counts: Counter[int], chances: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom.

    Args:
        counts: how often each token was drawn.
        chances: [V] their probabilities; tokens expected fewer than five times are counted together.
    """
    total = counts.total()
    expected: list[float] = []
    observed: list[int] = []
    rest_expected, rest_observed = 0.0, 0
    for token, chance in enumerate(chances.tolist()):
        if chance * total >= _EXPECTED:
            expected.append(chance * total)
            observed.append(counts[token])
        else:
            rest_expected += chance * total
            rest_observed += counts[token]
    if rest_expected >= 1:
        expected.append(rest_expected)
        observed.append(rest_observed)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return statistic, max(1, len(expected) - 1)


def _choice(engine: Engine, pair: Pair) -> tuple[list[int], int, Tensor]:
    """A prompt, the token that follows it nearly surely, and the probabilities [V] of the one after that."""
    tokenizer = pair.tokenizer
    for request in _REQUESTS:
        message = {"role": "user", "content": request}
        segments = [*head_segments(()), *messages_segments([message]), *generation_segments()]
        prompt = tokenizer.encode_segments(segments)
        answer = engine.generate(prompt, temperature=0, max_new_tokens=32, ignore_eos=True).ids
        ids = torch.tensor(prompt + answer)
        padded = torch.cat((ids, ids.new_zeros(-len(ids) % CHUNK_TOKENS)))
        last, _ = pair.target(padded[None])
        for place in range(len(prompt) + 1, len(ids)):
            chances = pair.target.lm_head(last[place - 1]).float().softmax(-1)
            sure = pair.target.lm_head(last[place - 2]).float().softmax(-1)[ids[place - 1]]
            if chances.max() < _MOST_LIKELY and sure > 1 - _MOST_LIKELY:
                return ids[: place - 1].tolist(), int(ids[place - 1]), chances
    raise DraftError("the target chooses nowhere in its answers: nothing to compare distributions by")
