"""Token counts as endpoints report them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Usage:
    """The counts of one request; `cached_tokens` is None where the endpoint does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


def parse_usage(document: Mapping[str, Any]) -> Usage | None:
    """The usage of a completion, or of a chunk of one, in OpenAI's shape; None when it has none."""
    usage = _mapping(document.get("usage"))
    prompt_tokens = usage.get("prompt_tokens")
    if not isinstance(prompt_tokens, int):
        return None
    cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def parse_tiers(document: Mapping[str, Any]) -> dict[str, int]:
    """From where the cached tokens of a completion, or of a chunk of one, came; empty when it does not say.

    Reads `cached_tokens_details` in `usage.prompt_tokens_details`, and in `sglext`, where SGLang puts it.
    """
    details = _mapping(_mapping(document.get("usage")).get("prompt_tokens_details"))
    for container in (details, _mapping(document.get("sglext"))):
        tiers = _mapping(container.get("cached_tokens_details"))
        if tiers:
            return {tier: int(tiers.get(tier) or 0) for tier in TIERS}
    return {}


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
