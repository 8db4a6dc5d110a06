"""What SGLang's own parsers read of a message is what ours reads."""

import json
from typing import Any

import pytest
from hypothesis import given
from k3_messages import assistant_messages, parse, sampled_ids

from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())


def spells_markers(message: dict[str, Any]) -> bool:
    """SGLang scans text, so it takes spelled markers for structure."""
    return "<|" in json.dumps(message, ensure_ascii=False)


@given(assistant_messages().filter(lambda message: not spells_markers(message)))
def test_sglang_reads_the_same(message: dict[str, Any]) -> None:
    tool_parser = pytest.importorskip("sglang.srt.function_call.kimik3_detector")
    reasoning_parser = pytest.importorskip("sglang.srt.parser.reasoning_parser")
    ids = sampled_ids(TOKENIZER, message)
    text = TOKENIZER.decode(ids).removesuffix("<|end_of_msg|>")
    thought = reasoning_parser.KimiK3Detector().detect_and_parse(text)
    answer = tool_parser.KimiK3Detector().detect_and_parse(thought.normal_text, [])
    _, completion = parse(TOKENIZER, ids)
    assert thought.reasoning_text == completion.reasoning
    assert answer.normal_text == completion.text
    assert [call.name for call in answer.calls] == [call.name for call in completion.calls]
    for theirs, ours in zip(answer.calls, completion.calls, strict=True):
        try:
            assert json.loads(theirs.parameters) == json.loads(ours.arguments)
        except json.JSONDecodeError:
            assert theirs.parameters == "{}", "SGLang knows no json element"
