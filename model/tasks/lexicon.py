"""Words, names and values that worlds are drawn from, in two disjoint splits.

A value (a code, a number, a slug) and the noun of a look-up tool belong to one split, decided by a checksum of
the text: what a held-out task asks for was never seen in training, though its letters were.
"""

from enum import StrEnum
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


WORDS: Final = tuple(
    """acorn alder amber anchor anvil apple arch arrow aspen atlas autumn badge bamboo banner barley basalt basin
    beacon beaver bell birch bison blaze bloom bolt border bottle boulder branch brass breeze brick bridge bronze
    brook brush bucket buffer button cabin cable cactus camel candle canoe canyon cargo carpet castle cedar cellar
    chain chalk cherry chess circle cliff clock cloud clover cobalt comet compass copper coral corner cotton crane
    crater crystal curtain cypress dagger daisy dawn delta desert diamond dolphin door dragon drum dune eagle
    echo elbow elm ember engine falcon feather fern ferry field finch flame flint forest fountain fox frost
    galaxy garden garnet gate ginger glacier glass globe goose granite grape gravel grove hammer harbor hawk hazel
    heron hill hollow honey horizon island ivory ivy jacket jade jasper jungle juniper kettle kite ladder lagoon
    lake lantern lark laurel lava lemon lily lime lion lizard lotus lumber magnet maple marble marsh meadow
    melon mesa meteor mill mint mirror moon moss mountain nectar needle nest nickel nova oak oasis ocean olive
    onyx opal orbit orchid otter owl oyster palm panda paper parrot pearl pebble pepper pigeon pilot pine planet
    plum pocket pond poppy prairie prism pulse quarry quartz quill rabbit radar raven reef ribbon ridge river
    robin rocket rose ruby saddle saffron sail salmon sand sapphire scarf shadow shell shore silver slate smoke
    snow spark sparrow spice spider spring spruce star stone storm summit sun swan temple thistle thunder tiger
    timber topaz torch tower trail tulip tunnel turtle valley velvet violet walnut water wave wheat willow wind
    window winter wolf yarrow zebra zenith""".split()
)

NAMES: Final = tuple(
    """Ada Alan Amara Anders Anita Bela Bruno Carla Chen Clara Dana David Elena Emil Erik Farah Felix Gita Greta
    Hana Hugo Ines Ivan Jana Jonas Kaito Karin Lars Leila Lena Luca Maja Marco Mei Milan Mina Nadia Nils Nora Omar
    Oskar Petra Priya Rafael Rosa Samir Sara Sofia Tariq Theo Uma Vera Viktor Wanda Yara Yuki Zoe""".split()
)

CITIES: Final = tuple(
    """Accra Ankara Athens Bergen Berlin Bogota Boston Cairo Cusco Dakar Delhi Denver Dublin Geneva Hanoi Havana
    Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Malmo Manila Milan Montreal Munich Nairobi
    Naples Oslo Osaka Paris Porto Prague Quito Riga Rome Santiago Seoul Seville Sofia Sydney Tallinn Tokyo Toronto
    Turin Vienna Vilnius Warsaw Zagreb Zurich""".split()
)

FIELDS: Final = tuple(
    """balance capacity code count deadline depth distance duration height humidity id label level limit length
    load owner phase pressure price quantity rank rating rate reading score serial size speed status stock
    temperature token total version voltage weight width zone""".split()
)

VERBS: Final = ("get", "fetch", "lookup", "query", "find", "check")
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


def noun(rng: Random, split: Split) -> str:
    """Draw the noun of a look-up tool: one word, or two joined by an underscore."""
    while True:
        text = rng.choice(WORDS) if rng.random() < 0.5 else f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
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
            return f"{rng.choice(WORDS)} {rng.choice(WORDS)}"
        case _:
            return f"{rng.choice(WORDS)} {rng.randrange(10, 1000)}"


def path(rng: Random) -> str:
    """Draw a file's path."""
    name = rng.choice(WORDS) if rng.random() < 0.5 else f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"
    return f"{rng.choice(DIRECTORIES)}/{name}.{rng.choice(EXTENSIONS)}"
