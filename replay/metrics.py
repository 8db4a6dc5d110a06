"""The tiers of a whole run from SGLang's `/metrics`, for endpoints that do not say per request."""

from prometheus_client.parser import text_string_to_metric_families

from replay.usage import TIERS

CACHED_TOKENS = "sglang:cached_tokens_total"


def cached_tokens_by_tier(page: str) -> dict[str, int]:
    """Tokens ever found in each tier, from the text of `/metrics`; empty when it has no such counters.

    Raises ValueError when the text is no metrics page.
    """
    tiers: dict[str, int] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            source = sample.labels.get("cache_source")
            if sample.name == CACHED_TOKENS and source in TIERS:
                tiers[source] = tiers.get(source, 0) + int(sample.value)
    return {tier: tiers.get(tier, 0) for tier in TIERS} if tiers else {}
