"""The rules of a run, and those of AgentX as a preset.

AgentX (InferenceX; the scenario `agentx` of aiperf and agentx-harness): every live session tree begins at a
random place between a quarter and three quarters of its recording, after up to 10 warm-up requests with the
prompts before that place and outputs of one token; measuring begins when all lanes are warm and lasts an
hour; ended sessions are followed by others, from their beginning, again and again; gaps are cut to 300 s in a
tree, and the whole system never idles for more than 10 s; the first user message begins with `[rid:...]`, so
that a repeated session finds nothing but its system prompt; the trace's counts are those of the messages'
text, to which the chat template and the mark add; a session that goes on keeps its last message only as far
as the last full block of the trace; a run is void with more than 1 % of prompts too long for the model, or
more than 10 % failures.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replay.record import Record
from replay.report import Report


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run does beyond sending each session once; times in seconds, limits are shares of requests.

    `start_window` are the shares of a session's requests between which lanes begin. `duration_s` counts
    from the end of warm-up. With `count_template` the trace's counts include what the chat template adds;
    `cut_tails` is explained in `layout.Planner`.
    """

    start_window: tuple[float, float] | None = None
    warm_up_requests: int = 0
    duration_s: float | None = None
    system_idle_cap_s: float | None = None
    recycle: bool = False
    cache_bust: bool = False
    count_template: bool = True
    cut_tails: bool = False
    overflow_limit: float = 0.01
    error_limit: float = 0.01

    def __post_init__(self) -> None:
        assert self.start_window is None or 0 <= self.start_window[0] <= self.start_window[1] <= 1, self
        assert self.warm_up_requests >= 0 and (self.duration_s is None or self.duration_s > 0), self

    @property
    def has_warm_up(self) -> bool:
        """Whether lanes wait for each other before measuring."""
        return self.start_window is not None or self.duration_s is not None


AGENTX: Final = Rules(
    start_window=(0.25, 0.75),
    warm_up_requests=10,
    duration_s=3600.0,
    system_idle_cap_s=10.0,
    recycle=True,
    cache_bust=True,
    count_template=False,
    cut_tails=True,
    error_limit=0.10,
)
SCENARIOS: Final[Mapping[str, Rules]] = {"none": Rules(), "agentx": AGENTX}
OVERFLOWS: Final = ("context length", "context_length", "maximum context", "too long")


def chosen(scenario: str, given: Mapping[str, Any]) -> Rules:
    """The scenario's rules with those that are given (None: not given) in their place."""
    return dataclasses.replace(
        SCENARIOS[scenario], **{name: value for name, value in given.items() if value is not None}
    )


def overflows(records: Sequence[Record]) -> int:
    """How many requests failed because their prompt was too long."""
    return sum(
        record.failure is not None and any(text in record.detail.lower() for text in OVERFLOWS)
        for record in records
    )


def invalid_because(
    rules: Rules,
    report: Report,
    records: Sequence[Record],
    *,
    forced: Mapping[str, bool],
    scale: str,
    time_scale: float,
    live: int,
    concurrency: int,
    measured_s: float,
    from_answers: bool = False,
) -> list[str]:
    """Why a run's figures may not be compared with others under these rules; empty when they may."""
    reasons: list[str] = []
    if not records:
        return ["no request was measured"]
    share = overflows(records) / len(records)
    if share > rules.overflow_limit:
        reasons.append(f"{share:.1%} of the prompts were too long, at most {rules.overflow_limit:.1%} may be")
    if report.error_rate > rules.error_limit:
        reasons.append(f"{report.error_rate:.1%} of the requests failed, at most {rules.error_limit:.1%} may")
    if rules.duration_s is not None and measured_s < rules.duration_s:
        reasons.append(f"measured for {measured_s:.0f} s, not for {rules.duration_s:.0f} s")
    refused = [name for name in ("ignore_eos", "min_tokens") if not forced.get(name)]
    if len(refused) == 2 and report.total.short_outputs:
        reasons.append(f"{report.total.short_outputs} outputs were shorter than recorded")
    if from_answers:
        reasons.append("sessions went on from the endpoint's answers, not from the recorded text")
    if scale != "1":
        reasons.append(f"token counts were scaled by {scale}")
    if time_scale != 1:
        reasons.append(f"gaps were scaled by {time_scale:g}")
    if live < concurrency:
        reasons.append(f"only {live} of {concurrency} session trees were live: there are too few sessions")
    if report.total.cached_tokens is None:
        reasons.append("the endpoint does not report cached tokens")
    return reasons
