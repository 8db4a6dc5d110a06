"""What an endpoint's chat template costs, measured by the prompt tokens that it reports.

Four prompts of known words give the four unknowns of `Overhead`; a fifth, longer one checks that the sum is
right.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay.client import ChatClient
from replay.errors import EndpointError, RequestFailed
from replay.filler import cache_bust
from replay.layout import ASSISTANT, SYSTEM, USER, Overhead
from replay.words import from_endpoint, from_tokenizer

ChatMessage = dict[str, str]
CountTokens = Callable[[Sequence[ChatMessage]], Awaitable[int]]
CORRELATION_ID = "calibration"
PROBE_WORDS = 8
CHECKED_TURNS = 4
CHECKED_WORDS = 40


@dataclass(frozen=True, slots=True)
class Calibration:
    """The overhead, and by how many tokens it missed a longer prompt (0 where the template is additive)."""

    overhead: Overhead
    residual_tokens: int


async def measure(
    client: ChatClient, tokenizer: Path | None, seed: int
) -> tuple[tuple[str, ...], Calibration]:
    """Words of one token each, from the tokenizer or by asking the endpoint, and what its template costs.

    Raises EndpointError, and ReplayError for an unreadable tokenizer.
    """

    async def count_messages(messages: Sequence[ChatMessage]) -> int:
        return await client.prompt_tokens(messages, CORRELATION_ID)

    async def count_text(text: str) -> int:
        return await count_messages([{"role": USER, "content": text}])

    try:
        words = from_tokenizer(tokenizer) if tokenizer is not None else await from_endpoint(count_text)
        return words, await calibrate(count_messages, words, seed)
    except RequestFailed as error:
        raise EndpointError(f"{client.url} can't be measured: {error}") from error


async def calibrate(count_tokens: CountTokens, words: Sequence[str], seed: int) -> Calibration:
    """Measure the template with words of one token each. Raises EndpointError when counts don't add up."""
    source = random.Random(seed)

    def text(length: int = PROBE_WORDS) -> str:
        return "".join(source.choices(words, k=length))

    def prompt(*roles: str) -> list[ChatMessage]:
        return [{"role": role, "content": text()} for role in roles]

    bare = await count_tokens(prompt(USER)) - PROBE_WORDS
    headed = await count_tokens(prompt(SYSTEM, USER)) - 2 * PROBE_WORDS
    answered = await count_tokens(prompt(SYSTEM, USER, ASSISTANT, USER)) - 4 * PROBE_WORDS
    try:
        user = await count_tokens(prompt(SYSTEM, USER, USER)) - 3 * PROBE_WORDS - headed
    except RequestFailed:
        # The template wants the roles to alternate: the pair is what is known, share it out.
        user = (answered - headed) // 2
    # A template with a system prompt of its own makes `bare` the longer one.
    system = max(0, headed - bare)
    assistant = answered - headed - user
    if user < 0 or assistant < 0 or headed - system - user < 0:
        raise EndpointError(
            "the endpoint's prompt token counts don't add up: "
            f"user {bare}, system and user {headed}, with an answer and a second question {answered}"
        )
    overhead = Overhead(system=system, user=user, assistant=assistant, prompt=headed - system - user)
    roles = [SYSTEM, *[USER, ASSISTANT] * CHECKED_TURNS, USER]
    long = [{"role": role, "content": text(CHECKED_WORDS)} for role in roles]
    expected = overhead.prompt + sum(overhead.of(role) + CHECKED_WORDS for role in roles)
    return Calibration(overhead, await count_tokens(long) - expected)


async def mark_tokens(client: ChatClient, words: Sequence[str]) -> int:
    """The tokens that `[rid:...]` costs at the start of a message. Raises EndpointError."""
    text = "".join(words[:PROBE_WORDS])
    try:
        counts = [
            await client.prompt_tokens([{"role": USER, "content": content}], CORRELATION_ID)
            for content in (text, cache_bust("probe") + text)
        ]
    except RequestFailed as error:
        raise EndpointError(f"{client.url} can't be measured: {error}") from error
    return counts[1] - counts[0]
