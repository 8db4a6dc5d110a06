"""Mutated requests to every API, each new in every run; `bench.malformed` sends thousands."""

import random

import pytest
from conftest import Gateway

from bench.malformed import bases, complaint, mutated
from bench.raw_client import Answer, RawClient
from bench.recorded_clients import CHAT, MESSAGES, RESPONSES

BODIES = 150


async def test_no_body_is_a_server_error_and_complaints_name_the_field(gateway: Gateway):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    client = await RawClient.connect(gateway.url)
    statuses: set[int] = set()
    for path, body in chance.choices(bases(), k=BODIES):
        sent = mutated(body, chance)
        answer = await client.post_bytes(path, sent)
        statuses.add(answer.status)
        assert complaint(path, answer) is None, f"seed {seed}: {sent[:2000]!r}"
    await client.close()
    assert 400 in statuses


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_what_is_mutated_was_valid(gateway: Gateway, path: str):
    client = await RawClient.connect(gateway.url)
    for base, body in bases():
        if base == path:
            assert (await client.post_bytes(path, body)).status == 200, body
    await client.close()


def test_complaints_are_complained_about():
    def answer(status: int, body: bytes) -> Answer:
        return Answer(status, {}, body, 0.0, 0.0)

    assert complaint(CHAT, answer(200, b"{}")) is None
    assert complaint(CHAT, answer(500, b"{}")) is not None
    assert complaint(CHAT, answer(400, b"no JSON")) is not None
    assert complaint(CHAT, answer(400, b'{"error":{"message":"Bad.","param":null}}')) is not None
    assert complaint(CHAT, answer(400, b'{"error":{"message":"n: must be 1.","param":"n"}}')) is None
    assert complaint(CHAT, answer(400, b'{"error":{"message":"Bad.","param":"n"}}')) is not None
    assert complaint(MESSAGES, answer(400, b'{"error":{"message":"max_tokens: too many."}}')) is None
