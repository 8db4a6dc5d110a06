"""What is known of one request after it was sent."""

from collections.abc import Mapping
from dataclasses import dataclass

from replay.client import Answer
from replay.layout import PlannedRequest


@dataclass(frozen=True, slots=True)
class Record:
    """One request: what the trace wanted, when it was due, and the answer or why there is none.

    `due_s` and the times of `answer` are on one clock; `sent_s` is when it left. Exactly one of `answer` and
    `failure` is set.
    """

    session: str
    agent: str
    turn: int
    planned: PlannedRequest
    due_s: float
    sent_s: float
    answer: Answer | None = None
    failure: str | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        assert (self.answer is None) != (self.failure is None), (self.answer, self.failure)

    @property
    def lateness_s(self) -> float:
        """How much later than due the request was sent."""
        return self.sent_s - self.due_s

    @property
    def tiers(self) -> Mapping[str, int]:
        """Cached tokens by tier, where the endpoint says."""
        return self.answer.tiers if self.answer else {}
