"""Grammars for forced calls: what they admit, compared with JSON schema and with SGLang's own tag."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from model.encoding import CLOSE, OPEN, SEP, message_segments
from model.structure import StructureError, forced_call_tag, tool_calls_format
from model.tokenizer import K3Tokenizer
from model.vocabulary import VOCAB_SIZE, tokenizer_json

xgrammar = pytest.importorskip("xgrammar")

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
STOP = TOKENIZER.markup["<|end_of_msg|>"]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "units": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": ["integer", "null"], "minimum": 1},
        "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
    },
    "required": ["city"],
}
REFERENCED = {
    "type": "object",
    "$defs": {
        "when": {"anyOf": [{"type": "string", "pattern": "[0-9]{4}"}, {"$ref": "#/$defs/day"}]},
        "day": {"type": "integer"},
    },
    "properties": {"when": {"$ref": "#/$defs/when"}, 'a "b"': {"const": 3}, "rest": True},
    "required": ["when"],
}
FREE = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "description": "of anything"},
        "map": {"type": "object", "description": "to anything"},
        "maps": {"type": "array", "items": {"type": "object", "title": "any"}},
    },
}
OPEN_ENDED = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}

ADMITTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (WEATHER, {"city": "Paris"}),
    (WEATHER, {"city": ""}),
    (WEATHER, {"city": 'say "hi" & <b>\n語 🙂 | |>'}),
    (WEATHER, {"city": "Paris", "units": "f"}),
    (WEATHER, {"city": "Paris", "days": 3}),
    (WEATHER, {"city": "Paris", "days": None}),
    (WEATHER, {"city": "Paris", "units": "c", "days": 12, "options": {"wind": True}}),
    (REFERENCED, {"when": "1999"}),
    (REFERENCED, {"when": 7}),
    (REFERENCED, {"when": 7, 'a "b"': 3}),
    (REFERENCED, {"when": 7, "rest": [1, {"x": None}]}),
    (REFERENCED, {"when": 7, "rest": "text"}),
    (REFERENCED, {"when": 7, "rest": False}),
    (OPEN_ENDED, {}),
    (OPEN_ENDED, {"a": 1, "b": -2}),
    (FREE, {"list": [1, {"a": None}], "map": {"b": [], "c": {"d": 1}}, "maps": [{"x": 1}]}),
    (FREE, {"list": [], "map": {}, "maps": []}),
    ({"type": "object", "properties": {}}, {}),
    ({"type": "object"}, {}),
    ({"allOf": [{"type": "object"}, {"properties": {"a": {"type": "number"}}}]}, {"a": 1.5}),
    ({"type": "object", "properties": {"a": {"enum": [1, "x", None]}}}, {"a": "x"}),
    ({"type": "object", "properties": {"a": {"enum": [1, "x", None]}}}, {"a": 1}),
    ({"type": "object", "properties": {"a": {"type": "number", "enum": [1, 2.5]}}}, {"a": 1}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (WEATHER, {}),
    (WEATHER, {"units": "c"}),
    (WEATHER, {"city": "Paris", "units": "k"}),
    (WEATHER, {"city": "Paris", "days": 0}),
    (WEATHER, {"city": "Paris", "days": "3"}),
    (WEATHER, {"city": 3}),
    (WEATHER, {"city": "Paris", "options": {}}),
    (WEATHER, {"city": "Paris", "unknown": 1}),
    (WEATHER, {"days": 3, "city": "Paris"}),
    (REFERENCED, {"when": "199"}),
    (REFERENCED, {"when": 7, 'a "b"': 4}),
    (OPEN_ENDED, {"a": "1"}),
    ({"type": "object"}, {"a": 1}),
    ({"type": "object", "properties": {"a": {"enum": [1, "x", None]}}}, {"a": "y"}),
]


@pytest.mark.parametrize("bounds", [{"maxLength": 16}, {"minLength": 1}, {"minLength": 1, "maxLength": 64}])
def test_a_string_of_bounded_length_ends_where_it_ends(compiler: Any, bounds: dict[str, int]) -> None:
    properties = {"text": {"type": "string", **bounds}, "count": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["text", "count"]}
    tag = forced_call_tag([tool(parameters)])
    for text in ("a", "a b", "main.c", "a << b", "语<p>🙂</p>", "0123456789abcdef"):
        assert admits(compiler, tag, call_ids(("f", {"text": text, "count": 3}))), text
    assert admits(compiler, tag, call_ids(("f", {"text": "", "count": 3}))) == ("minLength" not in bounds)
    assert admits(compiler, tag, call_ids(("f", {"text": "x" * 65, "count": 3}))) == (
        "maxLength" not in bounds
    )
    ids = call_ids(("f", {"text": "a b", "count": 3}))
    end = ids.index(TOKENIZER.markup[CLOSE])
    assert not admits(compiler, tag, [*ids[:end], *TOKENIZER.encode_text(CLOSE), *ids[end:]])


@pytest.mark.parametrize("bounds", [{"maxLength": -1}, {"minLength": 2, "maxLength": 1}, {"minLength": "1"}])
def test_a_length_that_is_none_is_refused(bounds: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"text": {"type": "string", **bounds}}}
    with pytest.raises(StructureError, match="Length"):
        forced_call_tag([tool(parameters)])


@pytest.fixture(scope="module")
def compiler() -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=__import__("tokenizers").Tokenizer.from_str(tokenizer_json()), eos_token="[EOS]"
    )
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB_SIZE, stop_token_ids=[STOP])
    return xgrammar.GrammarCompiler(info)


def tool(parameters: Any = WEATHER, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call_ids(*calls: tuple[str, dict[str, Any]]) -> list[int]:
    """The ids of the tools channel in an assistant message with these calls."""
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    segments = message_segments({"role": "assistant", "tool_calls": made})
    start = segments.index(("tools", False)) - 1
    end = len(segments) - 4  # close message, end of message
    assert segments[start] == (OPEN, True)
    assert segments[end] == (CLOSE, True)
    return TOKENIZER.encode_segments(segments[start:end])


def admits(compiler: Any, tag: str, ids: list[int]) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    return all(map(matcher.accept_token, ids)) and matcher.accept_token(STOP)


def sglang_tag(parameters: dict[str, Any]) -> str:
    """SGLang's grammar of the tools channel, without the free text before it."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    strict = tool(parameters)
    strict["function"]["strict"] = True
    parser = FunctionCallParser([Tool(**strict)], "kimi_k3")
    kind, tag = parser.get_structure_constraint("required", parallel_tool_calls=False)
    assert kind == "structural_tag"
    free_text, tools = json.loads(tag.model_dump_json())["format"]["elements"]
    assert free_text["type"] == "any_text"
    return json.dumps({"type": "structural_tag", "format": tools})


@pytest.mark.parametrize(("parameters", "arguments"), ADMITTED)
def test_admits_what_the_schema_admits(compiler: Any, parameters: Any, arguments: dict[str, Any]) -> None:
    assert admits(compiler, forced_call_tag([tool(parameters)]), call_ids(("f", arguments)))


@pytest.mark.parametrize(("parameters", "arguments"), REFUSED)
def test_refuses_what_the_schema_refuses(compiler: Any, parameters: Any, arguments: dict[str, Any]) -> None:
    assert not admits(compiler, forced_call_tag([tool(parameters)]), call_ids(("f", arguments)))


@pytest.mark.parametrize(("parameters", "arguments"), ADMITTED)
def test_sglang_admits_it_too(compiler: Any, parameters: Any, arguments: dict[str, Any]) -> None:
    if "allOf" in parameters:
        pytest.skip("SGLang wants properties at the top")
    assert admits(compiler, sglang_tag(parameters), call_ids(("f", arguments)))


def test_markers_cannot_be_spelled(compiler: Any) -> None:
    ids = call_ids(("f", {"city": "Paris"}))
    spelled = TOKENIZER.encode_text(TOKENIZER.decode(ids))
    assert not admits(compiler, forced_call_tag([tool()]), spelled)
    assert admits(compiler, sglang_tag(WEATHER), spelled)


def test_a_string_holds_no_markers(compiler: Any) -> None:
    ids = call_ids(("f", {"city": "Paris"}))
    at = ids.index(TOKENIZER.encode_text("Paris")[0])
    for marker in ("<|open|>", "<|sep|>", "<|end_of_msg|>"):
        assert not admits(
            compiler, forced_call_tag([tool()]), [*ids[:at], TOKENIZER.markup[marker], *ids[at:]]
        )


def test_exactly_one_call_unless_parallel(compiler: Any) -> None:
    tools = [tool(name="f"), tool({}, name="g")]
    one = call_ids(("g", {}))
    two = call_ids(("f", {"city": "Rome"}), ("g", {}))
    assert admits(compiler, forced_call_tag(tools), one)
    assert not admits(compiler, forced_call_tag(tools), two)
    assert admits(compiler, forced_call_tag(tools, parallel=True), one)
    assert admits(compiler, forced_call_tag(tools, parallel=True), two)
    opening = one[: one.index(TOKENIZER.markup[SEP]) + 1]
    empty = [*opening, TOKENIZER.markup[CLOSE], *opening[1:]]
    assert TOKENIZER.decode(empty) == "<|open|>tools<|sep|><|close|>tools<|sep|>"
    for parallel in (False, True):
        assert not admits(compiler, forced_call_tag(tools, parallel), empty)


def test_only_the_given_tools_can_be_called(compiler: Any) -> None:
    assert not admits(compiler, forced_call_tag([tool({}, name="f")]), call_ids(("ff", {})))
    odd = 'n"&m'
    assert admits(compiler, forced_call_tag([tool({}, name=odd)]), call_ids((odd, {})))


def test_a_bare_function_is_a_tool(compiler: Any) -> None:
    assert forced_call_tag([tool()["function"]]) == forced_call_tag([tool()])


def test_strings_can_be_bounded(compiler: Any) -> None:
    """The bound holds where the engine generates: the mask leaves nothing but the closing marker."""
    tag = forced_call_tag([tool()], max_string_tokens=3)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    ids = call_ids(("f", {"city": "one two three"}))
    words = TOKENIZER.encode_text("one two three")
    start = next(at for at in range(len(ids)) if ids[at : at + len(words)] == words)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)

    def allowed() -> list[int]:
        matcher.fill_next_token_bitmask(bitmask)
        return [id for id in range(VOCAB_SIZE) if bitmask[0, id // 32].item() >> (id % 32) & 1]

    for id in ids[:start]:
        allowed()
        assert matcher.accept_token(id)
    for id in words[:3]:
        assert len(allowed()) > 1000
        assert matcher.accept_token(id)
    assert allowed() == [TOKENIZER.markup["<|close|>"]]


@pytest.mark.parametrize(
    ("tools", "field", "remedy"),
    [
        ([], "tools", "at least one"),
        ([{"type": "function"}], "tools[0].function.name", "name"),
        ([{"function": 3}], "tools[0].function.name", "name"),
        ([tool([])], None, None),
        ([tool([1])], "tools[0].function.parameters", "JSON schema"),
        ([tool(), tool({"type": "string"})], "tools[1].function.parameters.type", "object"),
        ([tool({"type": "object", "required": ["a"]})], "tools[0].function.parameters.properties", "lacks a"),
        (
            [tool({"type": "object", "properties": {"a": False}, "required": ["a"]})],
            "tools[0].function.parameters.properties.a",
            "no value",
        ),
        ([tool({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}})], "tools", "define"),
        ([tool({"type": "object", "properties": {"a": {"$ref": "http://x"}}})], "tools", "local"),
    ],
)
def test_bad_tools_name_field_and_remedy(tools: Any, field: str | None, remedy: str | None) -> None:
    if field is None or remedy is None:
        assert tool_calls_format(tools)
        return
    with pytest.raises(StructureError) as raised:
        forced_call_tag(tools)
    assert str(raised.value).startswith(f"{field}: ")
    assert remedy in str(raised.value)


def test_recursive_schemas_end() -> None:
    tree = {
        "type": "object",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {"root": {"$ref": "#/$defs/node"}, "loop": {"$ref": "#/properties/loop"}},
    }
    assert "root" in forced_call_tag([tool(tree)])
