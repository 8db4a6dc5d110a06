"""What tenants have taken of their quotas, counted by one gateway for itself: for when the ledger is away."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cache_store.allowances import Limits, Refusal

_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class Bucket:
    """An allowance that is refilled at `per_minute`, and holds a minute's worth. Times are in seconds."""

    per_minute: int
    level: float
    at_s: float

    def refill(self, now_s: float) -> None:
        """Add what has come since the last time."""
        added = (now_s - self.at_s) * self.per_minute / _MINUTE_S
        self.level = min(float(self.per_minute), self.level + added)
        self.at_s = now_s

    @property
    def wait_s(self) -> int:
        """Whole seconds until one is there; 0 when it is."""
        return max(0, math.ceil((1 - self.level) * _MINUTE_S / self.per_minute))


@dataclass(slots=True)
class _Taken:
    turns: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True)
class LocalCounts:
    """The counts of one gateway, by tenant. Used by one event loop."""

    clock: Callable[[], float] = time.monotonic
    _tenants: dict[str, _Taken] = field(default_factory=dict[str, _Taken])

    def turn_refusal(self, tenant: str, limits: Limits) -> Refusal | None:
        """Which quota forbids one more turn; None when none does."""
        taken = self._taken(tenant, limits)
        if limits.concurrent_turns is not None and taken.turns >= limits.concurrent_turns:
            return Refusal("max_concurrent_turns", 1)
        if taken.tokens is not None and (wait_s := taken.tokens.wait_s):
            return Refusal("tokens_per_minute", wait_s)
        return self.request_refusal(tenant, limits)

    def request_refusal(self, tenant: str, limits: Limits) -> Refusal | None:
        """Which quota forbids one more request; None when none does."""
        taken = self._taken(tenant, limits)
        if taken.requests is not None and (wait_s := taken.requests.wait_s):
            return Refusal("requests_per_minute", wait_s)
        return None

    def begin(self, tenant: str, limits: Limits) -> None:
        """Count a turn that begins."""
        self._taken(tenant, limits).turns += 1
        self.take_request(tenant, limits)

    def take_request(self, tenant: str, limits: Limits) -> None:
        """Count a request."""
        if (bucket := self._taken(tenant, limits).requests) is not None:
            bucket.level -= 1

    def end(self, tenant: str, limits: Limits, tokens: int) -> None:
        """Count a turn that has ended, and the tokens that it took."""
        taken = self._taken(tenant, limits)
        taken.turns -= 1
        if taken.tokens is not None:
            taken.tokens.level -= tokens

    def _taken(self, tenant: str, limits: Limits) -> _Taken:
        now_s = self.clock()
        taken = self._tenants.get(tenant)
        if taken is None:
            taken = self._tenants[tenant] = _Taken(
                requests=_full(limits.requests_per_minute, now_s),
                tokens=_full(limits.tokens_per_minute, now_s),
            )
        for bucket in (taken.requests, taken.tokens):
            if bucket is not None:
                bucket.refill(now_s)
        return taken


def _full(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, per_minute, now_s)
