"""Turns that wait for a place: whose is the next.

Among tenants, the one that holds the least goes first (max-min fairness over what is scarce, KV on the
device); among the turns of one, the higher priority, then the earlier. So a tenant's priorities order its
own turns alone, and a tenant with a thousand sessions makes another with one wait for a place, not for a
thousand.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(order=True, frozen=True, slots=True)
class _Ticket(Generic[T]):
    """A place in a tenant's line."""

    rank: int
    number: int
    item: T = field(compare=False)


class FairQueue(Generic[T]):
    """Items that wait, by tenant and priority."""

    def __init__(self) -> None:
        self._lines: dict[str, list[_Ticket[T]]] = {}
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, tenant: str, priority: int, item: T) -> None:
        """Let an item wait; a higher `priority` goes before a lower one of the same tenant."""
        self._number += 1
        bisect.insort(self._lines.setdefault(tenant, []), _Ticket(-priority, self._number, item))

    def remove(self, tenant: str, item: T) -> bool:
        """Take an item out, wherever it is; whether it was there."""
        line = self._lines.get(tenant, [])
        for at, ticket in enumerate(line):
            if ticket.item is item:
                del line[at]
                if not line:
                    del self._lines[tenant]
                return True
        return False

    def first(self, held: Callable[[str], int]) -> T | None:
        """The item whose turn it is; `held` is what a tenant holds. None when nobody waits."""
        line = min(self._lines.items(), key=lambda entry: (held(entry[0]), entry[1][0].number), default=None)
        return None if line is None else line[1][0].item

    def __iter__(self) -> Iterator[T]:
        return (ticket.item for line in self._lines.values() for ticket in line)
