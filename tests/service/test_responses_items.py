"""An answer's items, sent back, are the message that the model wrote."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3_messages import assistant_messages, parse, sampled_ids

from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json
from service.digest import fingerprint, reasoning_digest
from service.encryption import ReasoningSeal
from service.errors import InvalidRequest
from service.fields import Fields
from service.reader import Step
from service.responses_answer import ResponsesAnswer
from service.responses_items import Item, messages_of, read_input, relocated, turn_of
from service.responses_request import read_responses_request

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
SEAL = ReasoningSeal(bytes(32), "acme")
TURN = "0123456789abcdef" * 2


def answered(message: dict[str, Any], **body: Any) -> tuple[list[Item], dict[str, Any]]:
    """The items of a response, and the message that is recorded."""
    request = read_responses_request(Fields({"input": "x", **body}), {}, TOKENIZER.vocab_size)
    events, completion = parse(TOKENIZER, sampled_ids(TOKENIZER, message))
    answer = ResponsesAnswer(TURN, "kimi-k3", request, TOKENIZER, SEAL)
    for _ in (*answer.events(Step(events)), *answer.last_events(completion)):
        pass
    return answer.body(completion)["output"], completion.message()


def messages(items: list[Item]) -> list[Any]:
    read = read_input(Fields({"input": items}))
    return [message for message, _ in messages_of([(item, "") for item in read], SEAL.open)]


@given(assistant_messages(), st.sampled_from(("all", "ids", "sealed", "summary")))
def test_items_make_the_message_again(message: dict[str, Any], kept: str):
    include = {"include": ["reasoning.encrypted_content"]} if kept == "sealed" else {}
    items, recorded = answered(
        message, reasoning={"summary": "auto"} if kept == "summary" else None, **include
    )
    for item in items:
        if kept == "ids":
            item.pop("id")
        if kept == "sealed" and item["type"] == "reasoning":
            item.pop("content")
    user = {"role": "user", "content": "Go on."}
    again, said = messages([*items, user])
    assert said["role"] == "user"
    assert fingerprint(again) == fingerprint(recorded)
    assert reasoning_digest(again) == reasoning_digest(recorded)
    assert again.get("turn") == (None if kept == "ids" else TURN)


def test_messages_that_follow_each_other_stay_apart():
    def text(words: str) -> dict[str, Any]:
        return {"role": "assistant", "content": words}

    assert [message["content"] for message in messages([text("One."), text("Two.")])] == ["One.", "Two."]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    first, second = messages([text("One."), call, thought, text("Two.")])
    assert (first["content"], len(first["tool_calls"])) == ("One.", 1)
    assert (second["reasoning_content"], second["content"]) == ("Hm.", "Two.")


def test_what_one_turn_wrote_stays_together():
    """A model may write text behind its calls: ids say that it was one turn."""
    message = {"type": "message", "role": "assistant", "content": "a", "id": f"msg_{TURN}"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": f"fc_{TURN}_0"}
    more = {**message, "content": "b", "id": f"msg_{TURN}_1"}
    (one,) = messages([message, call, more])
    assert (one["content"], one["turn"]) == ("ab", TURN)
    assert len(messages([message, call, {**more, "id": "msg_other"}])) == 2


@pytest.mark.parametrize("id", ["rs_x", "msg_in_" + TURN, "", None, 3, f"rs_{TURN}x", f"xx_{TURN}"])
def test_only_ids_of_ours_name_a_turn(id: Any):
    assert turn_of(id) is None
    assert turn_of(f"fc_{TURN}_12") == TURN


def test_complaints_are_about_the_item():
    error = InvalidRequest("messages[1].tool_calls: bad.", param="messages[1].tool_calls")
    moved = relocated(error, ["instructions", "input[4]"])
    assert moved.param == "input[4]"
    assert moved.message == "input[4].tool_calls: bad."
    other = InvalidRequest("tools: bad.", param="tools")
    assert relocated(other, []) is other
