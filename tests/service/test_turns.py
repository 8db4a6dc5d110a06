"""Exact turns over the real tokenizer and a real Redis."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from client_changes import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_messages import TEXT, VISIBLE_TEXT, assistant_messages, parse, sampled_ids

from cache_store.ledger import Ledger, new_key
from cache_store.servers import RedisServer, Role
from model.encoding import EncodingError, conversation_segments
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json
from service.channels import Channel
from service.conversation import Completion, Conversation, Finish
from service.turns import Prompt, Turns

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
Messages = list[dict[str, Any]]


@pytest.fixture
def url(ledger_server: RedisServer) -> str:
    return ledger_server.url


@asynccontextmanager
async def turns_at(url: str, **options: Any) -> AsyncIterator[Turns]:
    ledger = Ledger(url)
    try:
        yield Turns(ledger, TOKENIZER, **options)
    finally:
        await ledger.close()


def user(content: str = "go") -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(
    text: str = "done", *, reasoning: str = "", calls: Sequence[tuple[str, Any]] = ()
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"m{n}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


def completed(
    message: dict[str, Any], *, thinking: bool = True, cut: int | None = None, finish: Finish = "stop"
) -> Completion:
    """The completion when the model writes the message, or the first ids of it."""
    channel: Channel = "think" if thinking else "response"
    ids = sampled_ids(TOKENIZER, message, thinking=thinking)
    _, completion = parse(TOKENIZER, ids[:cut], channel=channel, finish=finish if cut is None else "length")
    fresh = tuple(replace(call, id=f"call_{new_key()}") for call in completion.calls)
    return replace(completion, calls=fresh)


async def play(
    turns: Turns,
    messages: Messages,
    message: dict[str, Any],
    *,
    tenant: str = "t",
    session: str | None = "s",
    cut: int | None = None,
    **head: Any,
) -> tuple[Prompt, Completion, Messages]:
    """One turn; returns the messages that a client which keeps everything goes on with."""
    conversation = Conversation(messages=tuple(messages), **head)
    prompt = await turns.prepare(tenant, session, conversation)
    completion = completed(message, thinking=conversation.thinking, cut=cut)
    assert (await turns.record(prompt, completion)).stored
    return prompt, completion, [*messages, completion.message()]


def seen(prompt: Prompt, completion: Completion) -> list[int]:
    return [*prompt.ids, *completion.ids]


def extends(prompt: Prompt, before: list[int]) -> bool:
    return prompt.ids[: len(before)] == before


@dataclass(frozen=True)
class Step:
    """What is said to the model, what it answers, and how the client sends the history back."""

    said: str
    results: list[str]
    says_more: bool
    answer: dict[str, Any]
    cut: int | None
    tool_choice: str | None
    client: int


STEPS = st.builds(
    Step,
    said=VISIBLE_TEXT,
    results=st.lists(TEXT, min_size=3, max_size=3),
    says_more=st.booleans(),
    answer=assistant_messages(),
    cut=st.none() | st.integers(0, 60),
    tool_choice=st.sampled_from((None, "required", "none")),
    client=st.integers(),
)


@settings(max_examples=150)
@given(
    steps=st.lists(STEPS, min_size=2, max_size=4),
    system=st.none() | TEXT,
    thinking=st.booleans(),
    effort=st.sampled_from((None, "low", "max")),
    session=st.sampled_from((None, "s")),
)
def test_prefix_invariant(
    url_for_properties: str,
    steps: list[Step],
    system: str | None,
    thinking: bool,
    effort: str | None,
    session: str | None,
) -> None:
    """Tokens of turn n are a prefix of the prompt of turn n+1, whatever the client did in between."""

    async def run() -> None:
        async with turns_at(url_for_properties) as turns:
            tenant = new_key()
            messages: Messages = [] if system is None else [{"role": "system", "content": system}]
            before: list[int] = []
            parent = None
            for step in steps:
                calls = messages[-1].get("tool_calls", []) if messages else []
                for call, result in zip(calls, step.results, strict=False):
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                if step.says_more or not calls:
                    messages.append(user(step.said))
                conversation = Conversation(
                    messages=tuple(changed(messages, step.client)),
                    tools=(TOOL,),
                    thinking=thinking,
                    effort=effort,
                    tool_choice=step.tool_choice,
                )
                prompt = await turns.prepare(tenant, session, conversation)
                assert extends(prompt, before)
                assert (prompt.parent, prompt.fallback, prompt.divergence) == (parent, None, None)
                assert prompt.continued_tokens >= len(before)
                assert all(0 <= id < TOKENIZER.vocab_size for id in prompt.ids)
                completion = completed(step.answer, thinking=thinking, cut=step.cut)
                assert (await turns.record(prompt, completion)).stored
                before, parent = seen(prompt, completion), prompt.turn
                messages = [*messages, completion.message()]

    asyncio.run(run())


@pytest.fixture(scope="session")
def url_for_properties(ledger_server: RedisServer) -> str:
    return ledger_server.url


async def test_a_first_prompt_is_the_whole_rendering(url: str) -> None:
    conversation = Conversation(
        messages=({"role": "system", "content": "Rules."}, user("hi"), answer(reasoning="hm"), user("more")),
        tools=(TOOL,),
        effort="high",
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    async with turns_at(url) as turns:
        prompt = await turns.prepare(new_key(), None, conversation)
    rendered = conversation_segments(
        conversation.messages,
        conversation.tools,
        thinking_effort="high",
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert prompt.ids == TOKENIZER.encode_segments(rendered)
    assert prompt.parent is None
    assert prompt.continued_tokens == 0


async def test_a_client_that_sends_all_back_gets_the_rendering_too(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(
            turns, [user()], answer(reasoning="hm", calls=[("run", {"a": 1})]), tenant=tenant
        )
        messages.append({"role": "tool", "tool_call_id": messages[1]["tool_calls"][0]["id"], "content": "ok"})
        prompt = await turns.prepare(tenant, "s", Conversation(messages=tuple(messages)))
    assert prompt.ids == TOKENIZER.encode_segments(conversation_segments(messages))
    assert prompt.continued_tokens > 0
    assert (prompt.restored_reasoning, prompt.restored_ids) == (0, 0)


async def test_odd_token_splits_are_continued_as_sampled(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        prompt = await turns.prepare(tenant, None, Conversation(messages=(user(),)))
        ids = sampled_ids(TOKENIZER, answer("reads a file"))
        single = {TOKENIZER.token_bytes(id): id for id in range(TOKENIZER.vocab_size)}
        split = [
            part
            for id in ids
            for part in (
                [id]
                if id in TOKENIZER.markup.values()
                else [single[bytes([byte])] for byte in TOKENIZER.token_bytes(id)]
            )
        ]
        assert split != ids
        _, completion = parse(TOKENIZER, split)
        await turns.record(prompt, completion)
        messages = (user(), completion.message(), user())
        after = await turns.prepare(tenant, None, Conversation(messages=messages))
    assert extends(after, [*prompt.ids, *split])


async def test_what_was_dropped_is_counted(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        messages: Messages = [user()]
        for _ in range(3):
            calls = [("run", {}), ("run", {"b": 1})]
            _, completion, messages = await play(
                turns, messages, answer(reasoning="hm", calls=calls), tenant=tenant
            )
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in completion.calls
            ]
        for message in messages:
            message.pop("reasoning_content", None)
        first = messages[1]["tool_calls"][0]
        messages[2]["tool_call_id"] = first["id"] = "mine"
        prompt = await turns.prepare(tenant, "s", Conversation(messages=tuple(messages)))
    assert prompt.restored_reasoning == 3
    assert prompt.restored_ids == 1


async def test_other_reasoning_is_a_version_of_its_own(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        first, done, messages = await play(turns, [user()], answer(reasoning="hm"), tenant=tenant)
        _, _, messages = await play(turns, [*messages, user()], answer("two", reasoning="so"), tenant=tenant)
        edited = copy.deepcopy([*messages, user()])
        edited[3]["reasoning_content"] = "something else"
        prompt = await turns.prepare(tenant, "s", Conversation(messages=tuple(edited)))
    assert prompt.parent == first.turn
    assert extends(prompt, seen(first, done))
    assert prompt.ids == TOKENIZER.encode_segments(conversation_segments(edited))
    assert prompt.divergence is not None
    assert prompt.divergence.startswith("messages[3] (assistant): reasoning differs from turn ")


async def test_a_version_with_other_reasoning_is_continued(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(turns, [user()], answer(reasoning="hm"), tenant=tenant)
        messages[1]["reasoning_content"] = "mine"
        own, done, messages = await play(turns, [*messages, user()], answer("two"), tenant=tenant)
        assert own.parent is None
        dropped = copy.deepcopy([*messages, user()])
        dropped[1].pop("reasoning_content")
        for sent in (messages, dropped):
            prompt = await turns.prepare(tenant, "s", Conversation(messages=tuple(sent)))
            assert prompt.parent == own.turn
            assert extends(prompt, seen(own, done))


@pytest.mark.parametrize("kept", ["reasoning", "ids", "session", "nothing"])
async def test_which_of_equal_looking_turns_is_continued(url: str, kept: str) -> None:
    tenant = new_key()
    tries = []
    async with turns_at(url) as turns:
        for number in range(3):
            message = answer("same", reasoning=f"thought {number}", calls=[("run", {})])
            tries.append(await play(turns, [user()], message, tenant=tenant, session=f"s{number}"))
        answered = copy.deepcopy(tries[0][2][1])
        if kept != "reasoning":
            answered.pop("reasoning_content")
        if kept != "ids":
            answered["tool_calls"][0]["id"] = "x"
        result = {"role": "tool", "tool_call_id": answered["tool_calls"][0]["id"], "content": "ok"}
        session = "s0" if kept == "session" else None
        after = await turns.prepare(tenant, session, Conversation(messages=(user(), answered, result)))
    expected = tries[2] if kept == "nothing" else tries[0]
    assert after.parent == expected[0].turn
    assert extends(after, seen(expected[0], expected[1]))


async def test_no_reasoning_is_not_taken_for_the_turn_that_had_none(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        own = await play(turns, [user()], answer("same", reasoning="mine"), tenant=tenant, session="mine")
        await play(turns, [user()], answer("same"), tenant=tenant, session="other")
        sent = Conversation(messages=(user(), answer("same"), user()))
        prompt = await turns.prepare(tenant, "mine", sent)
    assert prompt.parent == own[0].turn
    assert extends(prompt, seen(own[0], own[1]))


async def test_forks_continue_from_their_common_turn(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        first, done, messages = await play(turns, [user()], answer(), tenant=tenant)
        one = await play(turns, [*messages, user("left")], answer("l"), tenant=tenant)
        two = await play(turns, [*messages, user("right")], answer("r"), tenant=tenant)
        for fork, said in ((one, "left"), (two, "right")):
            assert fork[0].parent == first.turn
            assert extends(fork[0], seen(first, done))
            after = await turns.prepare(tenant, "s", Conversation(messages=(*fork[2], user(said))))
            assert after.parent == fork[0].turn


async def test_a_long_session_takes_every_token_from_the_ledger(url: str) -> None:
    tenant = new_key()
    messages: Messages = []
    async with turns_at(url) as turns:
        for number in range(40):
            said = [*messages, user(f"step {number}")]
            prompt, completion, messages = await play(turns, said, answer(f"did {number}"), tenant=tenant)
        after = await turns.prepare(tenant, "s", Conversation(messages=(*messages, user())))
    assert extends(after, seen(prompt, completion))
    assert after.continued_tokens == len(seen(prompt, completion))


@pytest.mark.parametrize(
    ("edit", "divergence"),
    [
        (lambda m: m[2].update(content="other"), "messages[2] (user): content differs from turn "),
        (lambda m: m[1].update(content="other"), "messages[1] (assistant): content differs from turn "),
        (lambda m: m[0].update(role="system"), "messages[0] (system): the role was user from turn "),
        (
            lambda m: m[2].update(name="ann"),
            "messages[2] (user): name, declared tools or answered call differ from",
        ),
        (lambda m: m.__delitem__(slice(1, 3)), "messages[0] (user): content differs from turn "),
        (lambda m: m[3].update(tool_calls=[]), "messages[3] (assistant): tool calls differ from turn "),
    ],
)
async def test_a_divergence_is_explained(url: str, edit: Any, divergence: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(turns, [user("one")], answer("1"), tenant=tenant)
        _, _, messages = await play(
            turns, [*messages, user("two")], answer("2", calls=[("run", {})]), tenant=tenant
        )
        if divergence.startswith("messages[0] (user)"):
            messages[0] = user("summary of what was said")
        edit(messages)
        conversation = Conversation(messages=(*messages, user("three")))
        prompt = await turns.prepare(tenant, "s", conversation)
        elsewhere = await turns.prepare(tenant, None, conversation)
    assert prompt.divergence is not None
    assert prompt.divergence.startswith(divergence)
    assert elsewhere.divergence is not None
    assert elsewhere.divergence.endswith("not a recorded turn")
    assert prompt.ids == elsewhere.ids


async def test_other_tools_are_explained(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(turns, [user()], answer(), tenant=tenant)
        prompt = await turns.prepare(tenant, "s", Conversation(messages=(*messages, user()), tools=(TOOL,)))
    assert prompt.divergence is not None
    assert prompt.divergence.startswith("tools, thinking or effort differ from turn ")


async def test_another_start_is_no_divergence(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        await play(turns, [user()], answer(), tenant=tenant)
        prompt = await turns.prepare(tenant, "s", Conversation(messages=(user("a title, please"),)))
    assert (prompt.parent, prompt.divergence) == (None, None)


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_cut_message_is_closed_and_continued(url: str, thinking: bool) -> None:
    tenant = new_key()
    whole = answer("a long text", reasoning="a long thought", calls=[("run", {"a": "b"}), ("run", {"n": 12})])
    size = len(sampled_ids(TOKENIZER, whole, thinking=thinking))
    async with turns_at(url) as turns:
        for cut in range(0, size, 3):
            said = [user(f"{cut}")]
            prompt, completion, messages = await play(
                turns, said, whole, tenant=tenant, cut=cut, thinking=thinking
            )
            conversation = Conversation(messages=(*messages, user("go on")), thinking=thinking)
            after = await turns.prepare(tenant, "s", conversation)
            assert after.parent == prompt.turn
            assert extends(after, [*prompt.ids, *completion.ids, *completion.closing])
            assert completion.closing[-1] == TOKENIZER.markup["<|end_of_msg|>"]


@pytest.mark.parametrize(
    ("begun", "written", "channel"),
    [
        ({"content": '{"a":'}, " 1}", "response"),
        ({"content": [{"type": "text", "text": "Dear"}], "reasoning_content": "polite"}, " Ann", "response"),
        ({"content": "", "reasoning_content": "Let me"}, " see", "think"),
        ({"content": None}, "well", "think"),
    ],
)
async def test_partial_goes_on_with_the_message(
    url: str, begun: dict[str, Any], written: str, channel: str
) -> None:
    tenant = new_key()
    message = {"role": "assistant", **begun, "partial": True}
    async with turns_at(url) as turns:
        conversation = Conversation(messages=(user(), message), partial=True)
        prompt = await turns.prepare(tenant, None, conversation)
        assert prompt.channel == channel
        whole = conversation_segments([user(), message], add_generation_prompt=False)
        assert TOKENIZER.encode_segments(whole)[: len(prompt.ids)] == prompt.ids
        if channel == "response":
            tail = sampled_ids(TOKENIZER, answer(written), thinking=False)
        else:
            tail = sampled_ids(TOKENIZER, answer("x", reasoning=written))
        _, completion = parse(TOKENIZER, tail, channel=prompt.channel)
        await turns.record(prompt, completion)
        text = begun["content"] if isinstance(begun["content"], str) else "Dear" if begun["content"] else ""
        sent = {"role": "assistant", "content": text + completion.text}
        after = await turns.prepare(tenant, None, Conversation(messages=(user(), sent, user())))
    assert after.parent == prompt.turn
    assert extends(after, seen(prompt, completion))


async def test_partial_with_calls_is_refused(url: str) -> None:
    message = {**answer(calls=[("run", {})]), "partial": True}
    async with turns_at(url) as turns:
        with pytest.raises(EncodingError, match=r"^messages\[1\]\.tool_calls: cannot be continued"):
            await turns.prepare("t", None, Conversation(messages=(user(), message), partial=True))


async def test_errors_name_the_message_of_the_whole_request(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(turns, [user()], answer(), tenant=tenant)
        bad = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}
        with pytest.raises(EncodingError) as error:
            await turns.prepare(tenant, "s", Conversation(messages=(*messages, user(), bad)))
    assert error.value.field == "messages[3].content[1].type"


@pytest.mark.parametrize("keep_tails", [True, False])
async def test_tails_stay_unless_told_otherwise(url: str, keep_tails: bool) -> None:
    tenant = new_key()
    async with turns_at(url, keep_tails=keep_tails) as turns:
        first = await play(turns, [user()], answer(), tenant=tenant, tools=(TOOL,), tool_choice="required")
        second = await play(turns, [*first[2], user()], answer("2"), tenant=tenant, tools=(TOOL,))
        messages = (*second[2], user())
        prompt = await turns.prepare(tenant, "s", Conversation(messages=messages, tools=(TOOL,)))
    assert prompt.parent == second[0].turn
    assert extends(prompt, seen(first[0], first[1])) == keep_tails
    assert extends(prompt, seen(second[0], second[1]))
    plain = TOKENIZER.encode_segments(conversation_segments(messages, (TOOL,)))
    assert (prompt.ids == plain) != keep_tails


async def test_tenants_and_tokenizers_share_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = new_key(), new_key()
    async with turns_at(url) as turns:
        _, _, messages = await play(turns, [user()], answer(), tenant=one)
        conversation = Conversation(messages=(*messages, user()))
        others = await turns.prepare(other, "s", conversation)
        own = await turns.prepare(one, "s", conversation)
        assert others.parent is None
        assert own.parent is not None
        assert set(own.context.chain.digests).isdisjoint(others.context.chain.digests)
        vocabulary = json.loads(tokenizer_json())
        vocabulary["added_tokens"][20]["content"] = "<|renamed|>"
        renamed = K3Tokenizer.from_json(json.dumps(vocabulary))
        ledger = Ledger(url)
        assert (await Turns(ledger, renamed).prepare(one, "s", conversation)).parent is None
        await ledger.close()


async def test_tokens_outside_the_vocabulary_are_never_sent(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        prompt = await turns.prepare(tenant, "s", Conversation(messages=(user(),)))
        completion = completed(answer())
        padded = replace(completion, ids=(*completion.ids[:1], TOKENIZER.vocab_size, *completion.ids[1:]))
        await turns.record(prompt, padded)
        conversation = Conversation(messages=(user(), completion.message(), user()))
        after = await turns.prepare(tenant, "s", conversation)
        assert (after.parent, after.fallback) == (None, "foreign_tokens")
        assert max(after.ids) < TOKENIZER.vocab_size
    async with turns_at(url, vocab_size=TOKENIZER.vocab_size + 1) as turns:
        assert (await turns.prepare(tenant, "s", conversation)).parent == prompt.turn
    ledger = Ledger(url)
    with pytest.raises(ValueError, match="vocab_size"):
        Turns(ledger, TOKENIZER, vocab_size=5)
    await ledger.close()


async def test_without_redis_a_prompt_is_rendered_as_a_whole(tmp_path: Path) -> None:
    tenant = new_key()
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with turns_at(server.url) as turns:
            _, _, messages = await play(turns, [user()], answer(reasoning="hm"), tenant=tenant)
            conversation = Conversation(messages=(*messages, user()))
            server.stop()
            prompt = await turns.prepare(tenant, "s", conversation)
            assert prompt.fallback == "ledger_unavailable"
            assert prompt.parent is None
            assert prompt.ids == TOKENIZER.encode_segments(conversation_segments(conversation.messages))
            assert not (await turns.record(prompt, completed(answer()))).stored
            server.start()
            prompt = await turns.prepare(tenant, "s", conversation)
            assert (prompt.fallback, prompt.parent is None) == (None, False)


async def test_a_path_with_a_gap_ends_before_it(tmp_path: Path) -> None:
    import redis

    tenant = new_key()
    with RedisServer(Role.LEDGER, tmp_path) as server:
        async with turns_at(server.url) as turns:
            played, messages = [], list[dict[str, Any]]()
            for number in range(4):
                said = [*messages, user(f"{number}")]
                *turn, messages = await play(turns, said, answer(f"{number}"), tenant=tenant)
                played.append(turn)
            client = redis.Redis(unix_socket_path=str(server.socket))
            conversation = Conversation(messages=(*messages, user()))
            for gap in (2, 0):
                client.delete(f"longhaul:turns:{tenant}:t:{played[gap][0].turn}")
                prompt = await turns.prepare(tenant, "s", conversation)
                before = played[gap - 1] if gap else None
                assert prompt.parent == (before[0].turn if before else None)
                assert prompt.ids == TOKENIZER.encode_segments(conversation_segments(conversation.messages))
            client.close()


async def test_a_used_path_is_renewed(tmp_path: Path) -> None:
    import redis

    tenant = new_key()
    with RedisServer(Role.LEDGER, tmp_path) as server:
        client = redis.Redis(unix_socket_path=str(server.socket))
        ledger = Ledger(server.url, ttl_s=4)
        turns = Turns(ledger, TOKENIZER)
        messages: Messages = []
        for number in range(8):
            prompt, _, messages = await play(turns, [*messages, user()], answer(f"{number}"), tenant=tenant)
            assert (prompt.parent is None) == (number == 0)
            await asyncio.sleep(0.9)
        left = [client.pttl(name) for name in client.scan_iter(f"longhaul:turns:{tenant}:t:*")]
        assert len(left) == 8
        assert min(left) > 2000
        await ledger.close()
        client.close()


async def test_a_turn_that_many_repeat_is_still_continued(url: str) -> None:
    tenant = new_key()
    async with turns_at(url) as turns:
        first = await play(turns, [user()], answer("same", reasoning="mine"), tenant=tenant)
        second = await play(turns, [*first[2], user()], answer("next"), tenant=tenant)
        for number in range(70):
            await play(turns, [user()], answer("same", reasoning=f"{number}"), tenant=tenant, session="other")
        prompt = await turns.prepare(tenant, "s", Conversation(messages=(*second[2], user())))
    assert prompt.parent == second[0].turn
    assert extends(prompt, seen(second[0], second[1]))
