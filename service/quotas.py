"""What each tenant may do: turns at once, requests and tokens a minute, bytes kept.

Rates are token buckets that hold a minute's worth: a tenant that was idle may spend that at once, and one
that has spent it goes on at its rate. Tokens are those that the engine computes, of the prompt (what a cache
gave is free) and of the answer. How many a turn takes is known when it ends, so it is admitted when anything
is left and charged then; the bucket may fall below zero, and the tenant waits until it is filled again.

All gateways on a ledger count together, there (`cache_store.allowances`). A turn under way is a lease that
its gateway renews: when that is killed, the turn is given back as the lease ends. While the ledger does not
answer, nobody is refused for that: each gateway counts for itself (`service.buckets`), as it always does
beside the ledger, so that it knows what it has let through.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from cache_store.allowances import Allowances, Limits, Refusal
from cache_store.ledger import Ledger, LedgerUnavailable, new_key
from service.buckets import LocalCounts
from service.errors import QuotaExceeded, TooManyTurns
from service.metrics import Metrics
from service.tenants import Tenant

_BYTES_KNOWN_S: Final = 5.0
"""How long a count of a tenant's bytes is good enough."""
_BYTES_RETRY_S: Final = 60
_AWAY_S: Final = 2.0
"""How long a ledger that did not answer is not asked again: nobody is to wait for it twice."""
_RENEWALS_A_LEASE: Final = 3


@dataclass(slots=True, eq=False)
class Hold:
    """A turn that counts until it is ended."""

    tenant: Tenant
    limits: Limits
    id: str = field(default_factory=new_key)
    tokens: int = 0
    ended_at_s: float | None = None


class Quotas:
    """The quotas of the tenants, as one gateway keeps them. Used by one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = 60.0,
    ) -> None:
        """`lease_s`: after how long a killed gateway's turns no longer count."""
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._lease_s = lease_s
        self._shared = Allowances(ledger, lease_s)
        self._local = LocalCounts(clock)
        self._bytes: dict[str, tuple[int, float]] = {}
        self._away_until_s = -math.inf
        self._holds: dict[str, Hold] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def begin(self, tenant: Tenant) -> Hold:
        """Let one turn begin. Raises TooManyTurns or QuotaExceeded, and then takes nothing."""
        await self._check_bytes(tenant)
        hold = Hold(tenant, _limits(tenant))
        if not hold.limits.any:
            return hold
        try:
            if not await self._asked(self._shared.begin(tenant.name, hold.limits, hold.id), tenant):
                self._raise(tenant, self._local.turn_refusal(tenant.name, hold.limits))
        except asyncio.CancelledError:  # the ledger may have begun it
            self._release(hold)
            raise
        self._local.begin(tenant.name, hold.limits)
        self._holds[hold.id] = hold
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return hold

    async def end(self, hold: Hold, tokens: int) -> None:
        """End a turn, and charge the tokens that it computed. Without effect when it is over."""
        if not hold.limits.any or hold.ended_at_s is not None:
            return
        hold.tokens = tokens
        self._local.end(hold.tenant.name, hold.limits, tokens)
        await asyncio.shield(self._release(hold))

    async def take_request(self, tenant: Tenant) -> None:
        """Take one of the tenant's requests. Raises QuotaExceeded."""
        limits = _limits(tenant)
        if limits.requests_per_minute is None:
            return
        if not await self._asked(self._shared.take_request(tenant.name, limits), tenant):
            self._raise(tenant, self._local.request_refusal(tenant.name, limits))
        self._local.take_request(tenant.name, limits)

    async def close(self) -> None:
        """Give back what is still held, as far as the ledger answers."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await asyncio.gather(*self._ending)

    async def renew(self) -> None:
        """Renew the leases of the turns under way, and tell the ledger of those whose end it has missed."""
        renewed: dict[str, list[Hold]] = {}
        for hold in list(self._holds.values()):
            if hold.ended_at_s is None:
                renewed.setdefault(hold.tenant.name, []).append(hold)
            elif self._clock() - hold.ended_at_s > self._lease_s:
                del self._holds[hold.id]
            else:
                await self._settle(hold)
        for tenant, holds in renewed.items():
            try:
                await self._shared.renew(tenant, [hold.id for hold in holds])
            except LedgerUnavailable:
                self._miss()
                return
            for hold in holds:
                if hold.ended_at_s is not None:  # meanwhile: the renewal may have begun it anew
                    await self._settle(hold)

    async def _renew(self) -> None:
        while self._holds:
            # Not more seldom than a ledger that was away is asked again: what it has missed counts there.
            await asyncio.sleep(min(self._lease_s / _RENEWALS_A_LEASE, _AWAY_S))
            await self.renew()

    async def _asked(self, question: Coroutine[Any, Any, Refusal | None], tenant: Tenant) -> bool:
        """Whether the ledger has let something through; False when it does not answer. Raises its refusal."""
        if self._clock() < self._away_until_s:
            question.close()
        else:
            try:
                self._raise(tenant, await question)
            except LedgerUnavailable:
                self._miss()
            else:
                return True
        self._metrics.quota_fallbacks.inc()
        return False

    def _raise(self, tenant: Tenant, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        limit = getattr(tenant, refusal.quota)
        if refusal.quota == "max_concurrent_turns":
            raise TooManyTurns(limit)
        raise QuotaExceeded(refusal.quota, limit, refusal.retry_after_s)

    def _release(self, hold: Hold) -> asyncio.Task[None]:
        """Tell the ledger that a turn has ended, whatever becomes of the one who says so."""
        hold.ended_at_s = self._clock()
        self._holds[hold.id] = hold
        task = asyncio.create_task(self._settle(hold))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _settle(self, hold: Hold) -> None:
        if self._clock() < self._away_until_s:
            return
        try:
            await self._shared.end(hold.tenant.name, hold.limits, hold.id, hold.tokens)
        except LedgerUnavailable:
            self._miss()
            return
        hold.tokens = 0  # they are charged
        self._holds.pop(hold.id, None)

    def _miss(self) -> None:
        self._away_until_s = self._clock() + _AWAY_S

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


def _limits(tenant: Tenant) -> Limits:
    return Limits(tenant.max_concurrent_turns, tenant.requests_per_minute, tenant.tokens_per_minute)
