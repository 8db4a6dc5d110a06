"""What each tenant may do: turns at once, requests and tokens a minute, bytes kept.

Rates are token buckets that hold a minute's worth: a tenant that was idle may spend that at once, and one
that has spent it goes on at its rate. Tokens are those that the engine computes, of the prompt (what a cache
gave is free) and of the answer. How many a turn takes is known when it ends, so it is admitted when anything
is left and charged then; the bucket may fall below zero, and the tenant waits until it is filled again.

Counts are those of one gateway: with several, each lets a tenant have its quota. Bytes are the ledger's own
count, the same for all.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from cache_store.ledger import Ledger, LedgerUnavailable
from service.errors import QuotaExceeded, TooManyTurns
from service.tenants import Tenant

_MINUTE_S: Final = 60.0
_BYTES_KNOWN_S: Final = 5.0
"""How long a count of a tenant's bytes is good enough."""
_BYTES_RETRY_S: Final = 60


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

    def wait_s(self, wanted: float) -> int:
        """Whole seconds until `wanted` is there; 0 when it is."""
        return max(0, math.ceil((wanted - self.level) * _MINUTE_S / self.per_minute))


class Quotas:
    """The quotas of one gateway's tenants. Used by one event loop."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._running: dict[str, int] = {}
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._bytes: dict[str, tuple[int, float]] = {}

    def running(self, tenant: Tenant) -> int:
        """How many turns the tenant has running."""
        return self._running.get(tenant.name, 0)

    @contextmanager
    def turn(self, tenant: Tenant) -> Generator[None]:
        """Hold one of the tenant's concurrent turns. Raises TooManyTurns when all are taken."""
        running = self.running(tenant)
        if tenant.max_concurrent_turns is not None and running >= tenant.max_concurrent_turns:
            raise TooManyTurns(tenant.max_concurrent_turns)
        self._running[tenant.name] = running + 1
        try:
            yield
        finally:
            self._running[tenant.name] -= 1

    async def admit(self, tenant: Tenant) -> None:
        """Let one turn begin. Raises QuotaExceeded, and then takes nothing."""
        self._check_tokens(tenant)
        await self._check_bytes(tenant)
        self.take_request(tenant)

    def take_request(self, tenant: Tenant) -> None:
        """Take one of the tenant's requests. Raises QuotaExceeded."""
        bucket = self._bucket(self._requests, tenant, tenant.requests_per_minute)
        if bucket is None:
            return
        if wait_s := bucket.wait_s(1):
            raise QuotaExceeded("requests_per_minute", bucket.per_minute, wait_s)
        bucket.level -= 1

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Take the tokens that a turn has computed."""
        bucket = self._bucket(self._tokens, tenant, tenant.tokens_per_minute)
        if bucket is not None:
            bucket.level -= tokens

    def _check_tokens(self, tenant: Tenant) -> None:
        bucket = self._bucket(self._tokens, tenant, tenant.tokens_per_minute)
        if bucket is not None and (wait_s := bucket.wait_s(1)):
            raise QuotaExceeded("tokens_per_minute", bucket.per_minute, wait_s)

    async def _check_bytes(self, tenant: Tenant) -> None:
        if tenant.max_turn_bytes is None:
            return
        stored, counted_at = self._bytes.get(tenant.name, (0, -math.inf))
        if self._clock() - counted_at > _BYTES_KNOWN_S:
            try:
                stored = await self._ledger.stored_bytes(tenant.name)
            except LedgerUnavailable:
                return  # nothing is stored then, either
            self._bytes[tenant.name] = stored, self._clock()
        if stored >= tenant.max_turn_bytes:
            raise QuotaExceeded("max_turn_bytes", tenant.max_turn_bytes, _BYTES_RETRY_S)

    def _bucket(self, buckets: dict[str, Bucket], tenant: Tenant, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        now_s = self._clock()
        bucket = buckets.get(tenant.name)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = buckets[tenant.name] = Bucket(per_minute, per_minute, now_s)
        bucket.refill(now_s)
        return bucket
