"""Turns that a signature names: chosen among those that the visible digest allows, and never beside it."""

from typing import Any

import pytest
from test_turns import TOKENIZER, answer, completed, extends, play, seen, turns_at, user

from cache_store.ledger import VERSIONS_KEPT, new_key
from cache_store.servers import RedisServer
from service.conversation import Conversation


@pytest.mark.parametrize("others", [1, VERSIONS_KEPT + 3])
async def test_a_named_turn_is_continued_whatever_came_after_it(ledger_server: RedisServer, others: int):
    """The same words, thought differently each time: the client says nothing but which turn was its own."""
    tenant = new_key()
    async with turns_at(ledger_server.url) as turns:
        prompt, completion, _ = await play(turns, [user()], answer(reasoning="mine"), tenant=tenant)
        for number in range(others):
            await play(turns, [user()], answer(reasoning=f"of number {number}"), tenant=tenant)
        shown: dict[str, Any] = {"role": "assistant", "content": "done"}
        for named, parent in (({**shown, "turn": prompt.turn}, prompt.turn), (shown, None)):
            conversation = Conversation((user(), named, user("more")))
            following = await turns.prepare(tenant, "s", conversation)
            assert (following.parent == prompt.turn) == (parent is not None)
            assert extends(following, seen(prompt, completion)) == (parent is not None)


async def test_a_name_does_not_stand_in_for_the_digest(ledger_server: RedisServer):
    tenant = new_key()
    async with turns_at(ledger_server.url) as turns:
        prompt, _, _ = await play(turns, [user()], answer(reasoning="hm"), tenant=tenant)
        for shown in (
            {"role": "assistant", "content": "done otherwise", "turn": prompt.turn},
            {"role": "assistant", "content": "done", "reasoning_content": "another", "turn": prompt.turn},
            {"role": "assistant", "content": "done", "turn": new_key(), "reasoning_content": "another"},
        ):
            following = await turns.prepare(tenant, "s", Conversation((user(), shown, user("more"))))
            assert following.parent is None
            assert following.continued_tokens == 0


async def test_another_tenants_turn_has_no_name(ledger_server: RedisServer):
    mine, theirs = new_key(), new_key()
    async with turns_at(ledger_server.url) as turns:
        prompt, _, _ = await play(turns, [user()], answer(reasoning="hm"), tenant=theirs)
        shown = {"role": "assistant", "content": "done", "turn": prompt.turn}
        assert (await turns.prepare(mine, "s", Conversation((user(), shown, user())))).parent is None


async def test_names_help_along_a_path(ledger_server: RedisServer):
    """Two sessions that show the same, turn after turn: each goes on with its own thoughts."""
    tenant = new_key()
    async with turns_at(ledger_server.url) as turns:
        histories: list[tuple[list[dict[str, Any]], list[int]]] = [([user()], []), ([user()], [])]
        for step in range(3):
            for number, (messages, before) in enumerate(histories):
                conversation = Conversation(tuple(messages))
                prompt = await turns.prepare(tenant, None, conversation)
                assert extends(prompt, before)
                completion = completed(answer(f"step {step}", reasoning=f"thought {number}"))
                assert (await turns.record(prompt, completion)).stored
                shown = {"role": "assistant", "content": f"step {step}", "turn": prompt.turn}
                histories[number] = ([*messages, shown, user()], seen(prompt, completion))
    assert TOKENIZER.decode(histories[0][1]) != TOKENIZER.decode(histories[1][1])
