"""What tenants have taken of their quotas, counted in the ledger's Redis for all gateways together.

    longhaul:quota:TENANT:turns     sorted set of the turns under way by the Unix time in ms at which their
                                    lease ends
    longhaul:quota:TENANT:requests  hash: level and the Unix time in ms at which it was so
    longhaul:quota:TENANT:tokens    the same

Levels are those of buckets that hold a minute's worth and are refilled at their rate; one that is full is not
there. A turn whose lease was not renewed in time is over: its gateway was killed. Each of the scripts is
atomic, and the time is the server's, so gateways need not agree on theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from cache_store.ledger import Ledger

_BUCKETS: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function level(key, rate)
  local held = redis.call('HMGET', key, 'level', 'at')
  if not held[1] then return rate end
  return math.min(rate, held[1] + math.max(0, now - held[2]) * rate / 60000)
end
local function take(key, rate, amount)
  local left = level(key, rate) - amount
  redis.call('HSET', key, 'level', string.format('%.17g', left), 'at', now)
  redis.call('PEXPIRE', key, math.ceil((rate - left) * 60000 / rate) + 1000)
end
local function wait_s(key, rate) return math.max(0, math.ceil((1 - level(key, rate)) * 60 / rate)) end
"""
_ADMIT: Final = (
    _BUCKETS
    + """
local turn, lease, turns = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local requests, tokens = tonumber(ARGV[4]), tonumber(ARGV[5])
if turn ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  if turns > 0 and redis.call('ZCARD', KEYS[1]) >= turns then return {'max_concurrent_turns', 1} end
  if tokens > 0 and wait_s(KEYS[3], tokens) > 0 then
    return {'tokens_per_minute', wait_s(KEYS[3], tokens)}
  end
end
if requests > 0 then
  if wait_s(KEYS[2], requests) > 0 then return {'requests_per_minute', wait_s(KEYS[2], requests)} end
  take(KEYS[2], requests, 1)
end
if turn ~= '' then
  redis.call('ZADD', KEYS[1], now + lease, turn)
  redis.call('PEXPIRE', KEYS[1], lease)
end
return {'', 0}
"""
)
"""KEYS: turns, requests, tokens. ARGV: turn or nothing, its lease in ms, the three limits, 0 for none.
Takes all that is asked for, or says which quota is used up and after how many seconds to ask again."""
_END: Final = (
    _BUCKETS
    + """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 and tonumber(ARGV[3]) > 0 then
  take(KEYS[2], tonumber(ARGV[3]), tonumber(ARGV[2]))
end
"""
)
"""KEYS: turns, tokens. ARGV: turn, tokens that it took, their limit or 0. A turn is charged at most once."""
_RENEW: Final = (
    _BUCKETS
    + """
for place = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[place]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
)
"""KEYS: turns. ARGV: lease in ms, turns."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may take; None: no limit."""

    concurrent_turns: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        assert all(limit is None or limit > 0 for limit in self._all())

    @property
    def any(self) -> bool:
        """Whether there is anything to count."""
        return any(limit is not None for limit in self._all())

    def _all(self) -> tuple[int | None, int | None, int | None]:
        return self.concurrent_turns, self.requests_per_minute, self.tokens_per_minute


@dataclass(frozen=True, slots=True)
class Refusal:
    """The quota that is used up, by its name in the tenants file, and when to ask again."""

    quota: str
    retry_after_s: int


class Allowances:
    """The counts in one ledger. Every method takes one round trip and raises `LedgerUnavailable`."""

    def __init__(self, ledger: Ledger, lease_s: float) -> None:
        self._ledger = ledger
        self._lease_ms = int(lease_s * 1000)

    async def begin(self, tenant: str, limits: Limits, turn: str) -> Refusal | None:
        """Take a request and begin a turn, or neither."""
        return await self._admit(tenant, limits, turn)

    async def take_request(self, tenant: str, limits: Limits) -> Refusal | None:
        """Take a request alone."""
        return await self._admit(tenant, limits, "")

    async def end(self, tenant: str, limits: Limits, turn: str, tokens: int) -> None:
        """End a turn that took so many tokens; without effect when it is over."""
        keys = [_key(tenant, "turns"), _key(tenant, "tokens")]
        await self._ledger.run_script(_END, keys, [turn, tokens, limits.tokens_per_minute or 0])

    async def renew(self, tenant: str, turns: Sequence[str]) -> None:
        """Let turns, one at least, go on for another lease, whether they are counted already or not."""
        await self._ledger.run_script(_RENEW, [_key(tenant, "turns")], [self._lease_ms, *turns])

    async def _admit(self, tenant: str, limits: Limits, turn: str) -> Refusal | None:
        keys = [_key(tenant, name) for name in ("turns", "requests", "tokens")]
        rates = (limits.concurrent_turns, limits.requests_per_minute, limits.tokens_per_minute)
        quota, retry_after_s = await self._ledger.run_script(
            _ADMIT, keys, [turn, self._lease_ms, *(rate or 0 for rate in rates)]
        )
        return Refusal(quota.decode(), retry_after_s) if quota else None


def _key(tenant: str, name: str) -> str:
    return f"longhaul:quota:{quote(tenant, safe='')}:{name}"
