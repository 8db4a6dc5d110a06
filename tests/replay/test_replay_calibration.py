import itertools
from collections.abc import Sequence

import pytest

from replay.calibration import calibrate
from replay.errors import EndpointError, RequestFailed
from replay.layout import Overhead

WORDS = tuple(f" w{number}" for number in range(50))
COSTS = {"system": 5, "user": 7, "assistant": 11}


def template(prompt: int = 9, default_system: int = 0, alternates: bool = False, trims: bool = False):
    """Counts tokens as a chat template with these habits would."""

    async def count(messages: Sequence[dict[str, str]]) -> int:
        roles = [message["role"] for message in messages]
        if alternates and any(left == right for left, right in itertools.pairwise(roles)):
            raise RequestFailed("http 400", "roles must alternate")
        tokens = prompt + sum(COSTS[role] for role in roles)
        tokens += sum(message["content"].count(" ") for message in messages)
        return tokens + (0 if "system" in roles else default_system) - (3 if trims and len(roles) > 4 else 0)

    return count


async def test_finds_what_each_role_costs():
    calibration = await calibrate(template(), WORDS, 0)
    assert calibration.overhead == Overhead(system=5, user=7, assistant=11, prompt=9)
    assert calibration.residual_tokens == 0


async def test_a_default_system_prompt_counts_as_part_of_the_prompt_only_when_it_is_sent():
    calibration = await calibrate(template(default_system=30), WORDS, 0)
    overhead = calibration.overhead
    assert overhead.system + overhead.prompt == 5 + 9
    assert (overhead.user, overhead.assistant, calibration.residual_tokens) == (7, 11, 0)


async def test_roles_that_must_alternate_share_what_a_pair_costs():
    calibration = await calibrate(template(alternates=True), WORDS, 0)
    assert calibration.overhead.user + calibration.overhead.assistant == 18
    assert calibration.residual_tokens == 0


async def test_a_template_that_is_not_additive_is_noticed():
    assert (await calibrate(template(trims=True), WORDS, 0)).residual_tokens == -3


async def test_counts_that_make_no_sense_are_an_error():
    async def count(messages: Sequence[dict[str, str]]) -> int:
        return 12

    with pytest.raises(EndpointError, match="don't add up"):
        await calibrate(count, WORDS, 0)
