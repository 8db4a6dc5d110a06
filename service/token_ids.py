"""A prompt's ids in pieces, each beside its JSON.

A prompt of 100,000 ids is 99 % those of recorded turns, whose JSON is made once. To make a list of all its
ids and that into JSON, for every request, would take longer than everything else that is done with it.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final, overload

import orjson


class TokenIds(Sequence[int]):
    """Ids, all of which are in `pieces`; `encoded` has each piece in JSON, without brackets.

    Equal to every sequence of the same ids.
    """

    __slots__ = ("_encoded", "_length", "_pieces")
    __hash__: Final = None  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType] # as a list

    def __init__(self, pieces: Sequence[Sequence[int]], encoded: Sequence[bytes]) -> None:
        assert len(pieces) == len(encoded)
        self._pieces = pieces
        self._encoded = encoded
        self._length = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._pieces)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice) and not index.start and index.step is None and (index.stop or 0) > 0:
            return list(islice(self, index.stop))
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def json(self) -> bytes:
        """All ids as a JSON array."""
        return b"[%b]" % b",".join(filter(None, self._encoded))


def encoded_ids(ids: Sequence[int]) -> bytes:
    """Ids in JSON, without brackets."""
    return orjson.dumps(ids.tolist() if isinstance(ids, array) else list(ids))[1:-1]
