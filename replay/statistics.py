"""What a trace is like: sizes, prefixes and gaps, over all its requests.

`appended` is what a prompt has behind the longest prefix of full blocks that an earlier request of its scope
had, an agent's first prompt aside; `gap` the time from an answer's end to the agent's next request. `idle` is
the share of the sessions' time in which none of their requests ran, None
where the trace does not tell how long any took. `peak` is a session's largest prompt with
its answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replay.layout import Overhead, Planner
from replay.report import Distribution, distribution
from replay.scale import Scale
from replay.trace import Session

WINDOW_TOKENS = 131_072
_BARE = Overhead(system=0, user=0, assistant=0, prompt=0)


@dataclass(frozen=True, slots=True)
class Sample:
    """A distribution with its mean."""

    mean: float
    percentiles: Distribution

    @classmethod
    def of(cls, values: Iterable[float]) -> "Sample | None":
        """None for no values."""
        listed = list(values)
        percentiles = distribution(listed)
        return None if percentiles is None else cls(sum(listed) / len(listed), percentiles)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The figures; counts in tokens, `gap` in seconds, shares from 0 to 1."""

    sessions: int
    requests: int
    subagents: int
    blocks_shared: bool
    turns: Sample
    input: Sample
    output: Sample
    appended: Sample | None
    gap: Sample | None
    peak: Sample
    theoretical_hit: float
    idle: float | None
    sessions_within_window: int


def statistics(sessions: Sequence[Session]) -> Statistics:
    """The statistics of at least one session."""
    assert sessions
    planner = Planner(Scale(), _BARE)
    inputs: list[int] = []
    outputs: list[int] = []
    appended: list[int] = []
    gaps: list[float] = []
    prefix_tokens = 0
    for session in sessions:
        for agent, planned in zip(session.agents, planner.plan(session), strict=True):
            inputs += [request.input_tokens for request in agent.requests]
            outputs += [request.output_tokens for request in agent.requests]
            prefix_tokens += sum(request.prefix_tokens for request in planned)
            appended += [request.input_tokens - request.prefix_tokens for request in planned[1:]]
            gaps += [
                max(0.0, after.start_s - before.end_s)
                for before, after in zip(agent.requests, agent.requests[1:], strict=False)
            ]
    peaks = [
        max(r.input_tokens + r.output_tokens for agent in session.agents for r in agent.requests)
        for session in sessions
    ]
    busy = [_busy_s(session) for session in sessions]
    span_s, used_s = sum(span for span, _ in busy), sum(used for _, used in busy)
    turns = Sample.of(session.turns for session in sessions)
    input_sample, output_sample, peak_sample = Sample.of(inputs), Sample.of(outputs), Sample.of(peaks)
    assert turns and input_sample and output_sample and peak_sample, "a session has a request"
    return Statistics(
        sessions=len(sessions),
        requests=len(inputs),
        subagents=sum(len(session.agents) - 1 for session in sessions),
        blocks_shared=any(session.shared_blocks for session in sessions),
        turns=turns,
        input=input_sample,
        output=output_sample,
        appended=Sample.of(appended),
        gap=Sample.of(gaps),
        peak=peak_sample,
        theoretical_hit=prefix_tokens / sum(inputs),
        idle=1 - used_s / span_s if used_s else None,
        sessions_within_window=sum(peak <= WINDOW_TOKENS for peak in peaks),
    )


def _busy_s(session: Session) -> tuple[float, float]:
    """From the session's first request to its last answer, and how long of that a request ran, in s."""
    spans = sorted((r.start_s, r.end_s) for agent in session.agents for r in agent.requests)
    begin, end, used = spans[0][0], spans[0][0], 0.0
    for start_s, end_s in spans:
        used += max(0.0, end_s - max(end, start_s))
        end = max(end, end_s)
    return end - begin, used
