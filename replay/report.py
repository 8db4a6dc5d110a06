"""What a replay comes to: per session and in total.

Hit rates are token-weighted over the requests that were answered: `actual_hit` = cached / prompt tokens as
the endpoint counts them, `theoretical_hit` = tokens in full blocks that an earlier request of the scope
began with / prompt tokens as the trace counts them, `hit_ratio` = the one by the other.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replay.client import Answer
from replay.record import Record
from replay.usage import TIERS


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of a sample, in its unit."""

    p50: float
    p90: float
    p99: float
    most: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """The percentiles, by linear interpolation between ranks; None for no values."""
    ranked = sorted(values)
    if not ranked:
        return None

    def percentile(share: float) -> float:
        rank = share * (len(ranked) - 1)
        below = int(rank)
        above = min(below + 1, len(ranked) - 1)
        return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)

    return Distribution(percentile(0.5), percentile(0.9), percentile(0.99), ranked[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one session, or of all.

    Token counts are sums over the answered requests, `requested` by the trace, `seen` by the endpoint;
    `largest_input_error` is the largest difference of the two in one request. `ttft`, `itl` and
    `end_to_end` are in seconds; `itl` is the mean gap between a request's tokens, over the requests with
    two or more. Hits are None where the endpoint does not report cached tokens, or the trace has no prefix
    to hit.
    """

    name: str
    turns: int
    errors: int
    short_outputs: int
    input_requested: int
    input_seen: int
    largest_input_error: int
    output_requested: int
    output_seen: int
    prefix_tokens: int
    cached_tokens: int | None
    tiers: dict[str, int] | None
    ttft: Distribution | None
    itl: Distribution | None
    end_to_end: Distribution | None

    @property
    def actual_hit(self) -> float | None:
        """Cached tokens per prompt token."""
        if self.cached_tokens is None or not self.input_seen:
            return None
        return self.cached_tokens / self.input_seen

    @property
    def theoretical_hit(self) -> float | None:
        """Tokens that an infinite cache would have, per prompt token."""
        return self.prefix_tokens / self.input_requested if self.input_requested else None

    @property
    def hit_ratio(self) -> float | None:
        """The actual hit by the theoretical one."""
        if self.actual_hit is None or not self.theoretical_hit:
            return None
        return self.actual_hit / self.theoretical_hit


def summarize(name: str, records: Sequence[Record]) -> Summary:
    """The figures of these records."""
    answered = [(record, record.answer) for record in records if record.answer is not None]
    cached = [answer.usage.cached_tokens for _, answer in answered]
    known = [tokens for tokens in cached if tokens is not None]
    tiered = bool(answered) and all(answer.tiers for _, answer in answered)
    return Summary(
        name=name,
        turns=len(records),
        errors=len(records) - len(answered),
        short_outputs=sum(
            answer.usage.completion_tokens < record.planned.output_tokens for record, answer in answered
        ),
        input_requested=sum(record.planned.input_tokens for record, _ in answered),
        input_seen=sum(answer.usage.prompt_tokens for _, answer in answered),
        largest_input_error=max(
            (answer.usage.prompt_tokens - record.planned.input_tokens for record, answer in answered),
            key=abs,
            default=0,
        ),
        output_requested=sum(record.planned.output_tokens for record, _ in answered),
        output_seen=sum(answer.usage.completion_tokens for _, answer in answered),
        prefix_tokens=sum(record.planned.prefix_tokens for record, _ in answered),
        cached_tokens=sum(known) if answered and len(known) == len(cached) else None,
        tiers={tier: sum(answer.tiers[tier] for _, answer in answered) for tier in TIERS} if tiered else None,
        ttft=distribution(answer.first_token_s - answer.sent_s for _, answer in answered),
        itl=distribution(_token_gaps(answer for _, answer in answered)),
        end_to_end=distribution(answer.end_s - answer.sent_s for _, answer in answered),
    )


def _token_gaps(answers: Iterable[Answer]) -> Iterable[float]:
    for answer in answers:
        tokens = answer.usage.completion_tokens
        if tokens > 1:
            yield (answer.end_s - answer.first_token_s) / (tokens - 1)


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of a run; `wall_s` from the first to the last request.

    `accept_length` is output tokens for each verification of a draft, None where the endpoint does not say.
    """

    sessions: tuple[Summary, ...]
    total: Summary
    wall_s: float
    scheduling_error: Distribution | None
    failures: dict[str, int]
    accept_length: float | None = None

    @property
    def error_rate(self) -> float:
        """Failed requests by all."""
        return self.total.errors / self.total.turns if self.total.turns else 0.0


def make_report(records: Sequence[Record]) -> Report:
    """Group the records by session, in the order in which the sessions began."""
    sessions: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.sent_s):
        sessions.setdefault(record.session, []).append(record)
    begins = min((record.sent_s for record in records), default=0.0)
    ends = max((record.answer.end_s for record in records if record.answer), default=begins)
    return Report(
        sessions=tuple(summarize(name, group) for name, group in sessions.items()),
        total=summarize("total", records),
        wall_s=ends - begins,
        scheduling_error=distribution(record.lateness_s for record in records),
        failures=dict(Counter(record.failure for record in records if record.failure is not None)),
    )
