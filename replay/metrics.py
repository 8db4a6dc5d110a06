"""What SGLang's `/metrics` says of a whole run: tiers, where answers do not say, and accepted drafts."""

from dataclasses import dataclass, field
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from replay.usage import TIERS

CACHED_TOKENS: Final = "sglang:cached_tokens_total"
GENERATED_TOKENS: Final = "sglang:generation_tokens_total"
VERIFICATIONS: Final = "sglang:spec_verify_calls_total"


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the engines began, over all of them and all traffic.

    `cached_tokens` are those ever found in each tier, empty where there are no such counters;
    `verifications` is how often drafted tokens were verified, 0 without speculation.
    """

    cached_tokens: dict[str, int] = field(default_factory=dict[str, int])
    generated_tokens: int = 0
    verifications: int = 0

    @classmethod
    def of(cls, page: str) -> Self:
        """From the text of `/metrics`. Raises ValueError when it is no metrics page."""
        tiers: dict[str, int] = {}
        counts = {GENERATED_TOKENS: 0, VERIFICATIONS: 0}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                source = sample.labels.get("cache_source")
                if sample.name == CACHED_TOKENS and source in TIERS:
                    tiers[source] = tiers.get(source, 0) + int(sample.value)
                elif sample.name in counts:
                    counts[sample.name] += int(sample.value)
        cached = {tier: tiers.get(tier, 0) for tier in TIERS} if tiers else {}
        return cls(cached, counts[GENERATED_TOKENS], counts[VERIFICATIONS])

    def since(self, before: "Counters") -> "Counters":
        """What was counted since then; no tiers where there were none then."""
        known = self.cached_tokens if before.cached_tokens else {}
        return Counters(
            {tier: count - before.cached_tokens[tier] for tier, count in known.items()},
            self.generated_tokens - before.generated_tokens,
            self.verifications - before.verifications,
        )

    @property
    def accept_length(self) -> float | None:
        """Output tokens for each verification, as SGLang counts it; None without speculation."""
        return self.generated_tokens / self.verifications if self.verifications > 0 else None
