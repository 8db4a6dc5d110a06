"""How fast an engine was in a replay, so that a simulation can be as fast."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from replay.record import Record

# How much the rates of replays of the same differ.
JITTER: Final = 0.07
# What prefills take beside their tokens, at most, of all that they take.
_MOST_BESIDE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast an engine was: tokens a second of prefill and of one request's output; seconds a prefill."""

    prefill: float
    decode: float
    request_s: float = 0.0

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Rates":
        """The rates of a replay. Prefill goes before decoding: who waits for a first token waits for it.

        A prefill is taken to cost some time, and more by its tokens: fitted to the waits, whose sum stays.
        """
        answers = sorted((record.answer for record in records if record.answer), key=lambda a: a.sent_s)
        waits: list[tuple[float, float]] = []
        requests: list[int] = []
        tokens: list[int] = []
        for answer in answers:
            begin_s = max(answer.sent_s, waits[-1][1] if waits else 0.0)
            if answer.first_token_s > begin_s:
                waits.append((begin_s, answer.first_token_s))
                requests.append(0)
                tokens.append(0)
            requests[-1] += 1
            tokens[-1] += answer.usage.prompt_tokens - (answer.usage.cached_tokens or 0)
        lengths = [end - begin for begin, end in waits]
        (request_s, _), *_ = np.linalg.lstsq(np.array([requests, tokens]).T, np.array(lengths), rcond=None)
        request_s = min(max(float(request_s), 0.0), _MOST_BESIDE * sum(lengths) / len(answers))
        decoded = sum(a.usage.completion_tokens - 1 for a in answers)
        decoding_s = sum(
            a.end_s
            - a.first_token_s
            - sum(max(0.0, min(a.end_s, end) - max(a.first_token_s, begin)) for begin, end in waits)
            for a in answers
        )
        beside_s = request_s * len(answers)
        return cls(sum(tokens) / (sum(lengths) - beside_s), decoded / decoding_s, request_s)

    def drawn(self, chance: random.Random) -> "Rates":
        """Rates around these."""
        return Rates(*(rate * chance.uniform(1 - JITTER, 1 + JITTER) for rate in dataclasses.astuple(self)))
