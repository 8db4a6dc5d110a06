"""Text for positions: words of one token each, chosen by block id.

The first tokens of a block spell its id in base `len(words)`, after a bijection that depends on the key; so
two blocks differ in their text whenever they are wide enough to hold the number at all, and prompts share
exactly the words that their block ids say. The rest of a block is filled by a keyed hash.
"""

import hashlib
import math
import struct
from dataclasses import dataclass, field

from replay.layout import Branch, Message
from replay.scale import Scale

SPELLED_TOKENS = 4
PICKS = struct.Struct(">32H")


@dataclass(frozen=True, slots=True)
class Filler:
    """Makes the text of one scope; `key` is 16 to 64 bytes. Same key, same words: same text."""

    words: tuple[str, ...]
    scale: Scale
    block_tokens: int
    key: bytes
    _spelling: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        assert len(self.words) >= 2 and len(set(self.words)) == len(self.words)
        factor, offset = (int.from_bytes(self._hash(name)) for name in (b"factor", b"offset"))
        factor %= len(self.words) ** SPELLED_TOKENS
        while math.gcd(factor, len(self.words)) != 1:
            factor += 1
        object.__setattr__(self, "_spelling", (factor, offset))

    def text(self, message: Message) -> str:
        """The message's text: exactly `message.words` words."""
        return "".join(self.words_at(message.branch, message.start, message.text_end))

    def words_at(self, branch: Branch, start: int, end: int) -> list[str]:
        """The words at the positions [start, end) of a branch."""
        words: list[str] = []
        while start < end:
            index = self.scale.block_at(start, self.block_tokens)
            begin = self.scale.position(index * self.block_tokens)
            stop = self.scale.position((index + 1) * self.block_tokens)
            block = self._block(branch.blocks[index], stop - begin)
            words += block[start - begin : min(end, stop) - begin]
            start = stop
        return words

    def _block(self, block: int, width: int) -> list[str]:
        words, base = self.words, len(self.words)
        spelled = min(width, SPELLED_TOKENS)
        factor, offset = self._spelling
        number = (block * factor + offset) % base**spelled
        text: list[str] = []
        for _ in range(spelled):
            number, digit = divmod(number, base)
            text.append(words[digit])
        part = 0
        while len(text) < width:
            picks = PICKS.unpack(self._hash(b"%d:%d" % (block, part)))
            text += [words[pick % base] for pick in picks]
            part += 1
        return text[:width]

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.key, digest_size=PICKS.size).digest()


def cache_bust(key: str) -> str:
    """AgentX's mark at the start of the first user message, `[rid:` and 12 hex digits `]`."""
    return f"[rid:{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}]\n\n"
