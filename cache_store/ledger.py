"""The turn ledger: per tenant a tree of turns in Redis."""


class Ledger:
    """Client of the turn tree. A fault of Redis is a miss, never an exception."""

    def __init__(self, url: str, *, ttl_s: int = 7 * 86_400, deadline_s: float = 0.25) -> None:
        raise NotImplementedError

    async def ping(self) -> bool:
        """Whether Redis answers within the deadline."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give the connections back."""
        raise NotImplementedError
