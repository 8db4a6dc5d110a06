"""Shrinking a trace: every token position is multiplied by one factor and rounded down.

Rounding positions rather than lengths keeps every relation: what was a prefix stays one, and a block begins
at the same place in every prompt that holds it. A block of 64 tokens is 2 at 1/32.
"""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor, over 0 and at most 1, exact."""

    factor: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ValueError(f"a scale must be over 0 and at most 1, is {self.factor}")

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """From `1/32`, `0.25` or `1`. Raises ValueError."""
        try:
            return cls(Fraction(text))
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"a scale is a fraction such as 1/32, over 0 and at most 1, not {text!r}"
            ) from error

    def __str__(self) -> str:
        return str(self.factor)

    def position(self, tokens: int) -> int:
        """Where a recorded token position lies."""
        return tokens * self.factor.numerator // self.factor.denominator

    def length(self, tokens: int) -> int:
        """A recorded prompt's or output's length, at least 1."""
        return max(1, self.position(tokens))

    def block_at(self, position: int, block_tokens: int) -> int:
        """The index of the last block that begins at or before a scaled position."""
        # position(index * block_tokens) <= p  <=>  index * block_tokens * factor < p + 1
        return -((position + 1) * self.factor.denominator // -(block_tokens * self.factor.numerator)) - 1
