"""Block ids for traces that tell lengths and shared prefixes but no ids."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockChain:
    """One conversation: what a prompt does not share with the one before it gets new ids.

    Ids count up from `first`, so that conversations with far enough firsts share nothing.
    """

    block_tokens: int
    first: int = 0
    blocks: tuple[int, ...] = ()
    _next: int = field(default=0)

    def prompt(self, shared_tokens: int, input_tokens: int, output_tokens: int = 0) -> tuple[int, ...]:
        """The full blocks of the next prompt, which begins with `shared_tokens` of what is known.

        Known are the prompt before and its `output_tokens`.
        """
        kept = self.blocks[: min(shared_tokens, input_tokens) // self.block_tokens]
        self.blocks = kept + self._fresh((input_tokens + output_tokens) // self.block_tokens - len(kept))
        return self.blocks[: input_tokens // self.block_tokens]

    def _fresh(self, count: int) -> tuple[int, ...]:
        begin = self.first + self._next
        self._next += count
        return tuple(range(begin, begin + count))
