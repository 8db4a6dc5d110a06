"""Words, names and values that worlds are drawn from, in two disjoint splits.

A value (a code, a number, a slug) and the noun of a look-up tool belong to one split, decided by a checksum
of the text: what a held-out task asks for was never seen in training, though its letters were.
"""

from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Final
from zlib import crc32

_HELD_OUT_OF = 8


class Split(StrEnum):
    """Which tasks a value may appear in."""

    TRAIN = "train"
    HELD_OUT = "held-out"


def split_of(text: str) -> Split:
    """The split that a value or a noun belongs to: one of eight is held out."""
    return Split.HELD_OUT if crc32(text.encode()) % _HELD_OUT_OF == 0 else Split.TRAIN


def _read_lists(text: str) -> dict[str, tuple[str, ...]]:
    """Word lists by name: `[name]` on a line of its own, then words."""
    sections = text.split("[")[1:]
    return {name: tuple(words.split()) for name, _, words in (section.partition("]") for section in sections)}


_LISTS: Final = _read_lists(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
WORDS: Final = _LISTS["words"]

NAMES: Final = _LISTS["names"]

CITIES: Final = _LISTS["cities"]

FIELDS: Final = _LISTS["fields"]

THINGS: Final = _LISTS["things"]
"""What tools of real services are about."""

VERBS: Final = (
    "get", "fetch", "lookup", "query", "find", "check", "search", "show", "load", "describe", "retrieve",
    "request",
)  # fmt: skip
_ONSETS, _NUCLEI = _LISTS["onsets"], _LISTS["nuclei"]
_CODAS: Final = ("", "", "", *_LISTS["codas"])
_COINED_SHARE: Final = 0.2
EXTENSIONS: Final = ("py", "toml", "cfg", "ini", "txt", "yaml")
DIRECTORIES: Final = ("src", "config", "lib", "app", "docs", "data", "tests", "tools")
_LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def _number(rng: Random) -> str:
    return str(rng.randrange(1_000, 10 ** rng.choice((4, 5, 6, 7))))


def _decimal(rng: Random) -> str:
    return f"{rng.randrange(10, 1000)}.{rng.randrange(100, 1000)}"


def _code(rng: Random) -> str:
    return (
        f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}-{rng.randrange(100, 1000)}-{rng.randrange(100, 1000)}"
    )


def _slug(rng: Random) -> str:
    return f"{rng.choice(WORDS)}-{rng.choice(WORDS)}-{rng.randrange(10, 1000)}"


def _hex(rng: Random) -> str:
    return f"{rng.getrandbits(32):08x}"


def _pair(rng: Random) -> str:
    return f"{rng.choice(WORDS)} {rng.choice(WORDS)} {rng.choice(WORDS)}"


_SHAPES: Final = (_number, _number, _decimal, _code, _code, _slug, _slug, _hex, _pair)


def value(rng: Random, split: Split) -> str:
    """Draw a value of any shape."""
    while split_of(text := rng.choice(_SHAPES)(rng)) is not split:
        pass
    return text


def number(rng: Random, split: Split) -> str:
    """Draw a whole number of four to seven digits."""
    while split_of(text := _number(rng)) is not split:
        pass
    return text


def code(rng: Random, split: Split) -> str:
    """Draw a code such as `KX-482-913`."""
    while split_of(text := _code(rng)) is not split:
        pass
    return text


def coin(rng: Random) -> str:
    """A word that is in no list: what a model copies letter by letter it must not know."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def word(rng: Random) -> str:
    """A word of the list, now and then one that is in none."""
    return coin(rng) if rng.random() < _COINED_SHARE else rng.choice(WORDS)


def fields(rng: Random) -> tuple[str, ...]:
    """The names of two to four different fields."""
    return tuple(
        {
            coin(rng) if rng.random() < _COINED_SHARE else name: None
            for name in rng.sample(FIELDS, rng.randrange(2, 5))
        }
    )


def noun(rng: Random, split: Split) -> str:
    """Draw the noun of a look-up tool: one word, or two joined by an underscore."""
    while True:
        first = rng.choice(THINGS) if rng.random() < 0.4 else word(rng)
        text = first if rng.random() < 0.6 else f"{first}_{word(rng)}"
        if split_of(text) is split:
            return text


def entity(rng: Random) -> str:
    """Draw what a look-up asks about: a city, a person, a place or a number."""
    match rng.randrange(4):
        case 0:
            return rng.choice(CITIES)
        case 1:
            return rng.choice(NAMES)
        case 2:
            return f"{word(rng)} {word(rng)}"
        case _:
            return f"{word(rng)} {rng.randrange(10, 1000)}"


def path(rng: Random) -> str:
    """Draw a file's path."""
    name = rng.choice(WORDS) if rng.random() < 0.5 else f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
    return f"{rng.choice(DIRECTORIES)}/{name}.{rng.choice(EXTENSIONS)}"
