"""How many bytes each tenant has in the ledger.

    longhaul:stored:TENANT:due     sorted set of "NAME:BYTES" by the Unix time in ms at which NAME expires
    longhaul:stored:TENANT:bytes   their sum

NAME is a key without its tenant's prefix, such as `t:KEY`. Entries are written and removed in the
transactions that write and remove what they count. Redis itself removes what expires, so expired entries are
looked after when somebody asks: one whose value lives on, because its time was renewed, gets its new time,
others go.
"""

from collections.abc import Iterable
from typing import Any, Final

_ENTRIES_A_CALL: Final = 1000

_SUM: Final = f"""
local now = tonumber(ARGV[1])
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, {_ENTRIES_A_CALL})) do
  local name, bytes = string.match(entry, '^(.*):(%d+)$')
  local left = redis.call('PTTL', ARGV[2] .. name)
  if left > 0 then
    redis.call('ZADD', KEYS[1], now + left, entry)
  else
    redis.call('ZREM', KEYS[1], entry)
    redis.call('DECRBY', KEYS[2], bytes)
  end
end
return redis.call('GET', KEYS[2])
"""
"""KEYS: due, bytes. ARGV: now in ms, the prefix of the tenant's keys. Atomic, and the same however often."""


def count(pipe: Any, tenant: str, name: str, size: int, *, now_ms: int, ttl_s: int, index_ttl_s: int) -> None:
    """Add a value that is written in the same transaction."""
    due, total = _names(tenant)
    pipe.zadd(due, {f"{name}:{size}": now_ms + ttl_s * 1000})
    pipe.incrby(total, size)
    for key in (due, total):
        pipe.expire(key, index_ttl_s)


def discount(pipe: Any, tenant: str, values: Iterable[tuple[str, int]]) -> None:
    """Take away values, (name, bytes), that are removed in the same transaction."""
    due, total = _names(tenant)
    values = list(values)
    if values:
        pipe.zrem(due, *(f"{name}:{size}" for name, size in values))
        pipe.decrby(total, sum(size for _, size in values))


async def stored_bytes(redis: Any, tenant: str, prefix: str, now_ms: int) -> int:
    """The sum; one round trip."""
    total = await redis.eval(_SUM, 2, *_names(tenant), now_ms, prefix)
    return max(0, int(total or 0))


def _names(tenant: str) -> tuple[str, str]:
    return f"longhaul:stored:{tenant}:due", f"longhaul:stored:{tenant}:bytes"
