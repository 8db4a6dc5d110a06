"""Words of exactly one token each, whatever follows or precedes them.

A word is a space and letters: tokenizers split before the space, so that words put one behind the other
stay one token each. With the tokenizer at hand the words come from its vocabulary; without, common English
words and single letters are tried on the endpoint, by the prompt tokens that it reports.
"""

import random
import re
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from replay.errors import EndpointError, ReplayError

MOST_WORDS = 1024
FEWEST_WORDS = 16
ENOUGH_WORDS = 64
GROUP = 32
MOST_PROBES = 160
SHUFFLES = 4

COMMON = """
    the and for that with this from have you not are was but all can will one has more when out use about
    time just like what some also into make get over new work good only other people first year way even
    two now how then them see many any these their know take than well back much go down because through
    after day us may most own very where life world state long little since last still never being old
    under same few house around while high place such again case point need home off great small both
    between part hand number fact head group right left keep side water night line name week body food job
    word money story book eye kind power end among set run move play live hold bring write sit stand
    lose pay meet learn lead watch stop add open walk win offer love buy wait serve die send build stay
    fall cut reach kill raise pass sell pull break act plan care field rate test system data file code
    list table value key node path text user function return class self import string type error result
    object index array model size start count check page image call input output default method order
    query server client request response message event process thread memory cache block token layer level
    train batch step loss weight graph edge color font style width height red blue green black white dark
    light early late large big low hot cold full free easy hard strong clear sure true real whole public
    human local social main major single simple able best better different important another country
    school family student problem company business program question government service area morning reason
    research moment air teacher force education foot age policy music market law car city
"""


def from_tokenizer(path: Path) -> tuple[str, ...]:
    """One-token words of the vocabulary in `tokenizer.json` (the file, or the folder that holds it).

    At most 1,024, the ones with the lowest ids. Raises ReplayError when there is no such file or too few
    words.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ReplayError(f"--tokenizer {path}: there is no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ReplayError(f"--tokenizer {path}: tokenizer.json can't be read ({error})") from error

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words: list[str] = []
    for number in sorted(tokenizer.get_vocab().values()):
        text = tokenizer.decode([number], skip_special_tokens=False)
        word = " " + text.strip()
        if re.fullmatch(r" [A-Za-z]+", word) and word not in words and tokens(word) == 1:
            words.append(word)
            if len(words) == MOST_WORDS:
                break
    shuffled = random.Random(0)
    for _ in range(SHUFFLES):
        text = shuffled.sample(words, len(words))
        if tokens("".join(text)) != len(text):
            raise ReplayError(f"--tokenizer {path}: words that are one token alone are not when put together")
    if len(words) < FEWEST_WORDS:
        raise ReplayError(f"--tokenizer {path}: its vocabulary has only {len(words)} words of letters")
    return tuple(words)


def candidates() -> tuple[str, ...]:
    """What is tried on an endpoint whose tokenizer is not at hand."""
    letters = [" " + chr(code) for first in "aA" for code in range(ord(first), ord(first) + 26)]
    return tuple(dict.fromkeys([*letters, *(" " + word for word in COMMON.split())]))


async def from_endpoint(
    count_tokens: Callable[[str], Awaitable[int]], tried: Sequence[str] | None = None
) -> tuple[str, ...]:
    """One-token words by trial; `count_tokens` tells the prompt tokens of a prompt with this user message.

    Groups whose count is right are kept whole, groups of mostly longer words dropped, others halved, until
    160 trials are spent. Raises EndpointError when fewer than 16 words are found.
    """
    words = tuple(dict.fromkeys(tried if tried is not None else candidates()))
    # Twice the word costs twice its tokens, so what is left is the prompt around it.
    around = [2 * await count_tokens(word) - await count_tokens(word + word) for word in words[:4]]
    empty = statistics.mode(around)
    probes = 2 * len(around)
    found: list[str] = []
    groups = [words[start : start + GROUP] for start in range(0, len(words), GROUP)]
    while groups and probes < MOST_PROBES:
        group = groups.pop(0)
        probes += 1
        excess = await count_tokens("".join(group)) - empty - len(group)
        if excess == 0:
            found += group
        elif len(group) > 1 and excess <= len(group) and len(found) < ENOUGH_WORDS:
            middle = len(group) // 2
            groups = [group[:middle], group[middle:], *groups]
    if len(found) < FEWEST_WORDS:
        raise EndpointError(
            f"only {len(found)} words are one token each at this endpoint, {FEWEST_WORDS} are needed: "
            "give the model's tokenizer with --tokenizer DIR"
        )
    return tuple(found)
