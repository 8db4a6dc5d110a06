"""Constraints against the grammar engine itself: whatever is sampled under them is what was asked for."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from model.structure import MAX_WHITESPACE_CHARS as TOOL_WHITESPACE
from model.tokenizer import K3Tokenizer
from service import constraint
from service.channels import Channel, ChannelParser
from service.constraint import MAX_THINKING_TOKENS, output_constraint, thinking_budget
from service.conversation import Completion, Conversation
from service.errors import InvalidRequest

torch = pytest.importorskip("torch")
xgrammar = pytest.importorskip("xgrammar")

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "set_mode",
            "parameters": {
                "type": "object",
                "properties": {"mode": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0}},
                "required": ["mode"],
            },
        },
    },
    {"type": "function", "function": {"name": 'odd "name"'}},
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def conversation(**more: Any) -> Conversation:
    return Conversation(messages=({"role": "user", "content": "Hi"},), **more)


@pytest.fixture(scope="module")
def compiler(tokenizer: K3Tokenizer) -> Any:
    vocabulary = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=sorted(tokenizer.eos_ids),
    )
    return xgrammar.GrammarCompiler(info, cache_enabled=False)  # see model.grammar


def sample(
    compiler: Any, tag: str, vocabulary: int, seed: int, limit: int, prefer: Sequence[int] = ()
) -> list[int]:
    """Ids chosen at random among those allowed; `prefer`red ones whenever they are."""
    chance = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    ids: list[int] = []
    while not matcher.is_terminated():
        assert len(ids) < limit, "the constraint does not come to an end"
        mask = xgrammar.allocate_token_bitmask(1, vocabulary)
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocabulary]
        allowed: list[int] = np.flatnonzero(bits).tolist()
        liked = [id for id in prefer if id in allowed]
        id = chance.choice(liked or allowed)
        assert matcher.accept_token(id)
        ids.append(id)
    return ids


def sampled_message(
    compiler: Any, tokenizer: K3Tokenizer, asked: Conversation, channel: Channel, seed: int, **more: Any
) -> Completion:
    constrained = output_constraint(
        asked, channel, tokenizer, max_tokens=64, single_call=more.pop("single_call", True)
    )
    ids = sample(compiler, constrained["structural_tag"], tokenizer.vocab_size, seed, 2000, **more)
    parser = ChannelParser(tokenizer, channel=channel)
    parser.feed(ids)
    parser.finish()
    completion = parser.completion("stop")
    # [EOS] may end a message, too; what stands before the end is complete by itself.
    assert completion.closing in ((), (tokenizer.markup["<|end_of_msg|>"],))
    return completion


@pytest.mark.parametrize("channel", ["think", "response", "message"])
@pytest.mark.parametrize("seed", range(5))
def test_a_forced_call_is_all_there_is(compiler: Any, tokenizer: K3Tokenizer, channel: Channel, seed: int):
    completion = sampled_message(
        compiler, tokenizer, conversation(tools=TOOLS, tool_choice="required"), channel, seed
    )
    (call,) = completion.calls
    arguments = json.loads(call.arguments)
    assert completion.text == ""
    if call.name == "set_mode":
        assert arguments["mode"] in ("on", "off")
        assert arguments.get("level", 0) >= 0
    else:
        assert (call.name, arguments) == ('odd "name"', {})
    assert completion.usage.reasoning_tokens <= 32
    assert channel == "think" or completion.usage.reasoning_tokens == 0


def test_a_named_tool_is_the_one(compiler: Any, tokenizer: K3Tokenizer):
    named = {"type": "function", "function": {"name": 'odd "name"'}}
    for seed in range(4):
        completion = sampled_message(
            compiler, tokenizer, conversation(tools=TOOLS, tool_choice=named), "think", seed
        )
        assert [call.name for call in completion.calls] == ['odd "name"']


def test_several_calls_where_they_are_allowed(compiler: Any, tokenizer: K3Tokenizer):
    asked = conversation(tools=TOOLS, tool_choice="required")
    counts = {
        len(sampled_message(compiler, tokenizer, asked, "response", seed, single_call=False).calls)
        for seed in range(5)
    }
    assert min(counts) >= 1
    assert max(counts) > 1


@pytest.mark.parametrize("channel", ["think", "response", "message"])
@pytest.mark.parametrize("response_format", [JSON_SCHEMA, {"type": "json_object"}])
def test_a_json_answer_is_json(
    compiler: Any, tokenizer: K3Tokenizer, channel: Channel, response_format: dict[str, Any]
):
    quote = tokenizer.encode_text('"}')
    closers = [tokenizer.encode_text(text)[0] for text in ("}", '"')]
    completion = sampled_message(
        compiler,
        tokenizer,
        conversation(response_format=response_format),
        channel,
        1,
        prefer=[*quote, *closers],
    )
    answer = json.loads(completion.text)
    assert completion.calls == ()
    if response_format is JSON_SCHEMA:
        assert answer.keys() == {"ok", "n"}
        assert answer["n"] in (1, 2)
    else:
        assert isinstance(answer, dict)


def test_a_model_with_tools_may_call_instead_of_answering(compiler: Any, tokenizer: K3Tokenizer):
    tag = output_constraint(
        conversation(tools=TOOLS, response_format=JSON_SCHEMA),
        "response",
        tokenizer,
        max_tokens=64,
        single_call=False,
    )["structural_tag"]
    from fake_engine import reply_ids

    call = {"type": "function", "function": {"name": "set_mode", "arguments": '{"mode": "on"}'}}
    for message, accepted in (
        ({"tool_calls": [call]}, True),
        ({"content": '{"ok": true, "n": 1}'}, True),
        ({"content": "no JSON"}, False),
    ):
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        ids = reply_ids(tokenizer, message, thinking=False)
        assert all(matcher.accept_token(id) for id in ids) is accepted


def test_nothing_is_forced_unless_it_was_asked_for(tokenizer: K3Tokenizer):
    for free in (
        conversation(),
        conversation(tools=TOOLS),
        conversation(tools=TOOLS, tool_choice="none"),
        conversation(response_format={"type": "text"}),
    ):
        assert output_constraint(free, "think", tokenizer, max_tokens=64, single_call=False) == {}


def test_thinking_takes_half_at_most():
    assert [thinking_budget(tokens) for tokens in (1, 2, 3, 4, 7, 8, 100)] == [0, 1, 1, 2, 2, 4, 32]
    assert thinking_budget(10**6) == MAX_THINKING_TOKENS


def test_white_space_is_bounded_alike():
    assert constraint.MAX_WHITESPACE_CHARS == TOOL_WHITESPACE


STRICT: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
    TOOLS[1],
)


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ON, ODD = (
    called("set_mode", '{"mode": "on"}'),
    called('odd "name"', '{"any": [1, {"thing": null}], "s": "<x>"}'),
)


@pytest.mark.parametrize("channel", ["think", "response"])
@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ({"content": "No call: <|open|>tools<|sep|>."}, True),
        ({"reasoning_content": "Hm.", "content": "Two.", "tool_calls": [ON, ODD]}, True),
        ({"tool_calls": [ON, ON, ON]}, True),
        ({"tool_calls": [called("set_mode", '{"mode": "of"}')]}, False),
        ({"tool_calls": [called("set_mode", '{"mode": "on", "more": 1}')]}, False),
        ({"tool_calls": [called("set_mode", "{}")]}, False),
        ({"tool_calls": [ON, called("set_mode", '{"mode": "on", "level": -1}')]}, False),
        ({"tool_calls": [called("other", "{}")]}, False),
    ],
)
def test_strict_tools_bind_once_the_call_begins(
    compiler: Any, tokenizer: K3Tokenizer, channel: Channel, message: dict[str, Any], accepted: bool
):
    from fake_engine import reply_ids

    thinking = channel == "think"
    if not thinking:
        message = {name: value for name, value in message.items() if name != "reasoning_content"}
    constrained = output_constraint(
        conversation(tools=STRICT), channel, tokenizer, max_tokens=64, single_call=False
    )
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constrained["structural_tag"]))
    ids = reply_ids(tokenizer, message, thinking=thinking)
    assert all(matcher.accept_token(id) for id in ids) is accepted


def test_strict_tools_leave_length_to_the_model(compiler: Any, tokenizer: K3Tokenizer):
    """Thinking and text are as long as the model likes, and no marker is among them."""
    constrained = output_constraint(
        conversation(tools=STRICT), "think", tokenizer, max_tokens=8, single_call=True
    )
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constrained["structural_tag"]))
    words = tokenizer.encode_text(" word" * 500)
    assert all(matcher.accept_token(id) for id in words)
    assert not matcher.accept_token(tokenizer.markup["<|open|>"])


def test_strict_tools_that_are_not_to_be_called_bind_nothing(tokenizer: K3Tokenizer):
    asked = conversation(tools=STRICT, tool_choice="none")
    assert output_constraint(asked, "think", tokenizer, max_tokens=64, single_call=False) == {}


@pytest.mark.parametrize(
    "rules",
    [
        {"type": 3},
        {"enum": 7},
        {"type": [["string"]]},
        {"required": 1},
        {"required": [{}]},
        {"required": ["q"], "properties": {"a": {}}},
        {"$ref": "#/nowhere"},
    ],
)
def test_what_is_no_schema_is_the_clients_fault(tokenizer: K3Tokenizer, rules: dict[str, Any]):
    inner = {"type": "object", "properties": {"a": rules}, "required": ["a"]}
    for parameters in ({"type": "object", **rules}, inner):
        tool = {"type": "function", "function": {"name": "bad", "strict": True, "parameters": parameters}}
        try:
            output_constraint(
                conversation(tools=(STRICT[0], tool)), "think", tokenizer, max_tokens=9, single_call=False
            )
        except InvalidRequest as error:
            assert error.param == "tools"
            assert error.code == "invalid_schema"
            assert "tools" in error.message
            break
    else:
        pytest.fail("a schema was made of it")
