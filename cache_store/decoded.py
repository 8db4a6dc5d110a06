"""A bounded memory of decoded turns, so that a session's path is not decoded again for every request.

A turn is taken from here only for the very bytes that Redis has just given: what was erased or replaced there
is not found here either.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from cache_store.turn import Turn, TurnFormatError, decode_turn

DEFAULT_BUDGET_BYTES: Final = 64 << 20
_ID_BYTES: Final = 4 + 7
"""In an array, and in JSON with a comma: ids have up to six digits."""
_OVERHEAD_BYTES: Final = 2560


class DecodedTurns:
    """Least recently used turns within a budget of bytes."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._turns: OrderedDict[str, tuple[bytes, Turn]] = OrderedDict()

    def decode(self, key: str, data: bytes | None) -> Turn | None:
        """The turn of these bytes; None when there are none, or they are damaged.

        Nobody looks at every id again: that none is higher than `highest` says is seen to here.
        """
        if data is None:
            return None
        held = self._turns.get(key)
        if held is not None and held[0] == data:
            self._turns.move_to_end(key)
            return held[1]
        try:
            turn = decode_turn(key, data)
        except TurnFormatError:
            return None
        if any(max(ids, default=0) > turn.highest for ids in (turn.prompt, turn.completion, turn.closing)):
            return None
        self._forget(key)
        self._turns[key] = (data, turn)
        self._held_bytes += _size(data, turn)
        while self._held_bytes > self._budget_bytes:
            self._forget(next(iter(self._turns)))
        return turn

    def forget(self, keys: Iterable[str]) -> None:
        """Leave nothing of these turns in memory."""
        for key in keys:
            self._forget(key)

    def _forget(self, key: str) -> None:
        if (held := self._turns.pop(key, None)) is not None:
            self._held_bytes -= _size(*held)


def _size(data: bytes, turn: Turn) -> int:
    ids = len(turn.prompt) + len(turn.completion) + len(turn.closing)
    text = len(turn.reasoning) + sum(len(part) for call in turn.calls for part in call)
    return len(data) + _ID_BYTES * ids + text + _OVERHEAD_BYTES
