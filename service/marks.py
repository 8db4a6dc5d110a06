"""What the ledger keeps of each message beside the tokens, to check reasoning and to explain a divergence.

A mark is 21 bytes: the role's first letter, the first 4 bytes of the fingerprint's content, calls and
attributes, and the digest of the reasoning.
"""

from typing import Final

from service.digest import SHORT_BYTES, Fingerprint

_ASPECTS: Final = (
    ("content differs", slice(1, 5)),
    ("tool calls differ", slice(5, 9)),
    ("name, declared tools or answered call differ", slice(9, 13)),
)
_ROLES: Final = {b"s": "system", b"u": "user", b"a": "assistant", b"t": "tool"}


def mark(fingerprint: Fingerprint, reasoning: bytes) -> bytes:
    """The mark of a message."""
    assert len(reasoning) == SHORT_BYTES
    return b"".join(
        (
            fingerprint.role[:1].encode(),
            fingerprint.content[:4],
            fingerprint.calls[:4],
            fingerprint.attributes[:4],
            reasoning,
        )
    )


def reasoning_of(mark: bytes) -> bytes:
    """The digest of the reasoning."""
    return mark[-SHORT_BYTES:]


def difference(shown: bytes, recorded: bytes) -> str | None:
    """How the visible part of a message differs from a recorded one; None when it does not."""
    if shown[:1] != recorded[:1]:
        return f"the role was {_ROLES.get(recorded[:1], 'another')}"
    return next((text for text, part in _ASPECTS if shown[part] != recorded[part]), None)
