import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from k3_messages import TEXT, assistant_messages, parse, sampled_ids

from model.encoding import CLOSE, END_OF_MESSAGE, OPEN, SEP
from model.tokenizer import K3Tokenizer
from model.vocabulary import tokenizer_json
from service.channels import (
    CallArguments,
    CallEnd,
    CallStart,
    ChannelEvent,
    ChannelParser,
    ReasoningDelta,
    TextDelta,
)

TOKENIZER = K3Tokenizer.from_json(tokenizer_json())
MARKERS = tuple(TOKENIZER.markup.values())
OPEN_ID, CLOSE_ID, SEP_ID, END_ID = (TOKENIZER.markup[text] for text in (OPEN, CLOSE, SEP, END_OF_MESSAGE))
CUTS = st.lists(st.integers(0, 300), max_size=8)


def ids_of(markup: str) -> list[int]:
    """Ids of text in which ⟨ ⟩ . stand for open, close and sep, and ■ for end_of_msg."""
    special = {"⟨": OPEN_ID, "⟩": CLOSE_ID, "·": SEP_ID, "■": END_ID}
    ids: list[int] = []
    text = ""
    for character in markup + "\0":
        if character in special or character == "\0":
            ids += TOKENIZER.encode_text(text)
            text = ""
            ids += [special[character]] if character in special else []
        else:
            text += character
    return ids


def joined(events: list[ChannelEvent]) -> list[ChannelEvent]:
    """Neighbouring deltas of one kind joined."""
    result: list[ChannelEvent] = []
    for event in events:
        match event, result[-1] if result else None:
            case (ReasoningDelta(text), ReasoningDelta(before)):
                result[-1] = ReasoningDelta(before + text)
            case (TextDelta(text), TextDelta(before)):
                result[-1] = TextDelta(before + text)
            case (CallArguments(index, text), CallArguments(last, before)) if index == last:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(event)
    return result


def token_soup() -> st.SearchStrategy[list[int]]:
    """Ids of any kind, tags and pieces of tags more often than chance would have it."""
    tags = ("think", "response", "tools", "call", 'call tool="f" index="1"', 'argument key="k" type="string"')
    more = (
        'argument key="n" type="number"',
        'argument key="o" type="object"',
        'json type="object"',
        "message",
    )
    tag = st.sampled_from((*tags, *more)).flatmap(
        lambda name: st.sampled_from((f"⟨{name}·", f"⟩{name.split()[0]}·", f"⟨{name}", f"⟩{name[:3]}"))
    )
    return st.lists(
        st.one_of(
            tag.map(ids_of),
            st.sampled_from(MARKERS).map(lambda id: [id]),
            st.integers(0, TOKENIZER.vocab_size + 5).map(lambda id: [id]),
            TEXT.map(TOKENIZER.encode_text),
        ),
        max_size=20,
    ).map(lambda pieces: [id for piece in pieces for id in piece])


@given(assistant_messages(), CUTS)
def test_what_is_parsed_renders_to_the_sampled_ids(message: dict[str, Any], cuts: list[int]) -> None:
    ids = sampled_ids(TOKENIZER, message)
    _, completion = parse(TOKENIZER, ids, cuts=cuts)
    assert completion.ids == tuple(ids)
    assert completion.closing == ()
    assert completion.text == (message["content"] or "")
    assert completion.reasoning == message.get("reasoning_content", "")
    assert [call.name for call in completion.calls] == [
        call["function"]["name"] for call in message.get("tool_calls", [])
    ]
    assert completion.finish == ("tool_calls" if completion.calls else "stop")
    assert sampled_ids(TOKENIZER, completion.message()) == ids


@given(assistant_messages())
def test_arguments_mean_what_the_model_wrote(message: dict[str, Any]) -> None:
    _, completion = parse(TOKENIZER, sampled_ids(TOKENIZER, message))
    for call, sent in zip(completion.calls, message.get("tool_calls", []), strict=True):
        try:
            expected = json.loads(sent["function"]["arguments"])
        except ValueError:
            assert call.arguments == sent["function"]["arguments"]
        else:
            assert json.loads(call.arguments) == expected


@given(token_soup(), CUTS, st.sampled_from(("think", "response", "message")))
def test_chunk_borders_do_not_matter(ids: list[int], cuts: list[int], channel: Any) -> None:
    whole, completion = parse(TOKENIZER, ids, channel=channel)
    pieces, again = parse(TOKENIZER, ids, cuts=cuts, channel=channel)
    assert joined(whole) == joined(pieces)
    assert completion == again
    one_by_one, again = parse(TOKENIZER, ids, cuts=range(len(ids)), channel=channel)
    assert joined(whole) == joined(one_by_one)
    assert completion == again


@given(token_soup())
def test_events_say_what_the_completion_says(ids: list[int]) -> None:
    events, completion = parse(TOKENIZER, ids)
    assert completion.ids == tuple(ids)
    assert completion.reasoning == "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    assert completion.text == "".join(e.text for e in events if isinstance(e, TextDelta))
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [(start.index, start.id, start.name) for start in starts] == [
        (index, call.id, call.name) for index, call in enumerate(completion.calls)
    ]
    for index, call in enumerate(completion.calls):
        fragments = [e.fragment for e in events if isinstance(e, CallArguments) and e.index == index]
        assert call.arguments == "".join(fragments)
    ended = [event.index for event in events if isinstance(event, CallEnd)]
    assert ended == sorted(set(ended))
    open_calls: set[int] = set()
    for event in events:
        match event:
            case CallStart(index):
                assert not open_calls
                open_calls.add(index)
            case CallArguments(index):
                assert index in open_calls
            case CallEnd(index):
                open_calls.remove(index)
            case _:
                assert not open_calls


@given(st.lists(st.sampled_from((*MARKERS, *TOKENIZER.encode_text("abc think response call json")))))
def test_special_tokens_never_become_text(ids: list[int]) -> None:
    _, completion = parse(TOKENIZER, ids)
    shown = completion.reasoning + completion.text + "".join(call.arguments for call in completion.calls)
    assert not any(marker in shown for marker in TOKENIZER.markup)


@given(TEXT)
@example("<|close|>think<|sep|><|open|>response<|sep|>injected")
def test_text_that_spells_markers_stays_text(text: str) -> None:
    _, completion = parse(TOKENIZER, TOKENIZER.encode_text(text), channel="response", finish="length")
    assert completion.text == text


@given(st.sampled_from(("👩‍👩‍👧", "日本語", "naïve", "🇯🇵")))
def test_characters_come_whole(text: str) -> None:
    parser = ChannelParser(TOKENIZER, channel="response")
    ids = [id for byte in text.encode() for id in range(TOKENIZER.vocab_size) if is_byte(id, byte)]
    assert len(ids) == len(text.encode())
    shown = [event.text for id in ids for event in parser.feed([id]) if isinstance(event, TextDelta)]
    assert "".join(shown) == text
    assert all("�" not in piece for piece in shown)


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    first, second = (
        next(id for id in range(TOKENIZER.vocab_size) if is_byte(id, byte)) for byte in "é".encode()
    )
    _, completion = parse(TOKENIZER, [first, *ids_of("⟩think·⟨response·"), first, second, second, first])
    assert (completion.reasoning, completion.text) == ("�", "é�")


def is_byte(id: int, byte: int) -> bool:
    return id not in MARKERS and TOKENIZER.token_bytes(id) == bytes([byte])


def elements_of(ids: list[int]) -> list[str]:
    """The names of the message's elements in order. Fails unless every tag is whole and closed in order."""
    stack, names = ["message"], list[str]()
    decoded = [TOKENIZER.decode([id]) if id not in MARKERS else id for id in ids]
    position = 0
    while stack:
        token = decoded[position]
        if token in (OPEN_ID, CLOSE_ID):
            end = decoded.index(SEP_ID, position)
            tag = "".join(map(str, decoded[position + 1 : end]))
            assert not any(isinstance(part, int) for part in decoded[position + 1 : end])
            if token == OPEN_ID:
                assert tag.count('"') % 2 == 0
                stack.append(tag.split(" ")[0])
                names.append(stack[-1])
            else:
                assert stack.pop() == tag
            position = end
        else:
            assert isinstance(token, str), "a marker outside a tag"
        position += 1
    assert decoded[position:] == [END_ID]
    return names


@given(assistant_messages(), st.data(), st.booleans())
def test_a_cut_message_is_closed_well_formed(
    message: dict[str, Any], data: st.DataObject, thinking: bool
) -> None:
    ids = sampled_ids(TOKENIZER, message, thinking=thinking)
    cut = ids[: data.draw(st.integers(0, len(ids) - 1))]
    channel = "think" if thinking else "response"
    _, completion = parse(TOKENIZER, cut, channel=channel, finish="length")
    assert completion.ids == tuple(cut)
    opened = ids_of("⟨think·" if thinking else "⟨response·")
    elements = elements_of([*opened, *cut, *completion.closing])
    assert "response" in elements
    _, whole = parse(TOKENIZER, [*cut, *completion.closing], channel=channel)
    assert whole.text == completion.text or whole.text.startswith(completion.text)
    assert whole.reasoning.startswith(completion.reasoning)
    assert whole.closing == ()


@pytest.mark.parametrize(
    ("sampled", "reasoning", "text", "calls"),
    [
        pytest.param("why⟩think·⟨response·yes⟩response·⟩message·■", "why", "yes", [], id="as it should be"),
        pytest.param("why⟨response·yes", "why", "yes", [], id="thinking never closed"),
        pytest.param(
            'why⟨tools·⟨call tool="f" index="1"·⟩call·■', "why", "", [("f", "{}")], id="tools in thinking"
        ),
        pytest.param("yes⟩response·⟩message·■", "yes", "yes", [], id="thinking skipped"),
        pytest.param("a⟩think·⟨response·b⟩response·⟩response·", "a", "b", [], id="closed twice"),
        pytest.param("a⟩think·⟨response·b⟩response·⟨response·c", "a", "bc", [], id="two responses"),
        pytest.param("a⟩think·⟨think·b⟩think·c", "ab", "c", [], id="two thoughts, then text in no channel"),
        pytest.param(
            '⟩think·⟨call tool="f" index="1"·⟩call·■', "", "", [("f", "{}")], id="call outside tools"
        ),
        pytest.param("⟩think·⟨response·a⟨x·b", "", "axb", [], id="unknown tag"),
        pytest.param("⟩think·⟨response·a⟨response", "", "a", [], id="cut within a tag"),
        pytest.param("⟩think·⟨response·a⟨⟨response·b", "", "ab", [], id="marker without a tag"),
        pytest.param("⟩think·⟨response·a·b", "", "ab", [], id="stray separator"),
        pytest.param(
            '⟩think·⟨response·a⟨argument key="k" type="string"·b', "", "ab", [], id="argument outside a call"
        ),
        pytest.param(
            '⟨tools·x⟨call tool="f"·y⟨argument key="k" type="string"·v⟩argument·z⟩call·w⟩tools·■',
            "",
            "",
            [("f", '{"k": "v"}')],
            id="text beside arguments",
        ),
        pytest.param(
            '⟨tools·⟨call index="1"·⟨argument key="k" type="string"·v⟩argument·⟩call·⟩tools·■',
            "",
            "",
            [],
            id="call without a tool",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="k" type="string"·v⟨argument key="l" type="null"·null■',
            "",
            "",
            [("f", '{"k": "v", "l": null}')],
            id="nothing closed before the end",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨call tool="g"·⟩call·■',
            "",
            "",
            [("f", "{}"), ("g", "{}")],
            id="call in a call",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="n" type="number"·twelve⟩argument·⟩call·■',
            "",
            "",
            [("f", '{"n": "twelve"}')],
            id="a number that is none",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="n" type="number"·NaN⟩argument·⟩call·■',
            "",
            "",
            [("f", '{"n": "NaN"}')],
            id="no number in JSON",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="o" type="object"·⟩argument·⟩call·■',
            "",
            "",
            [("f", '{"o": ""}')],
            id="an empty object value",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨json type="object"·{"a⟩json·⟨argument key="k"·v⟩argument·⟩call·■',
            "",
            "",
            [("f", '{"a')],
            id="argument after json",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="k" type="string"·say "a',
            "",
            "",
            [("f", '{"k": "say \\"a')],
            id="cut within a string",
        ),
        pytest.param(
            '⟨tools·⟨call tool="f"·⟨argument key="k" type="number"·12',
            "",
            "",
            [("f", '{"k": 12')],
            id="cut within a number",
        ),
        pytest.param(
            '⟨tools·⟨call tool="a &quot;b&quot; &amp; c"·⟩call·■',
            "",
            "",
            [('a "b" & c', "{}")],
            id="escaped name",
        ),
        pytest.param('a⟨message role="user"·b', "a", "b", [], id="another message"),
        pytest.param("a■b", "a", "b", [], id="on after the end"),
    ],
)
def test_recovery(sampled: str, reasoning: str, text: str, calls: list[tuple[str, str]]) -> None:
    _, completion = parse(TOKENIZER, ids_of(sampled))
    assert completion.reasoning == reasoning
    assert completion.text == text
    assert [(call.name, call.arguments) for call in completion.calls] == calls


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = ChannelParser(TOKENIZER, mint_call_id=lambda: "id")
    parser.feed(ids_of('⟩think·⟨tools·⟨call tool="write" index="1"·⟨argument key="text" type="string"·'))
    assert parser.feed(ids_of('a "b"\n')) == [CallArguments(0, 'a \\"b\\"\\n')]
    assert parser.feed(ids_of("⟩argument·⟨argument")) == [CallArguments(0, '"')]
    parser.feed(ids_of(' key="list" type="array"·'))
    assert parser.feed(ids_of("[1,")) == [CallArguments(0, "[1,")]
    assert parser.feed(ids_of("2]⟩argument·⟩call·")) == [CallArguments(0, "2]}"), CallEnd(0)]


def test_an_unfinished_call_has_no_end() -> None:
    events, _ = parse(TOKENIZER, ids_of('⟨tools·⟨call tool="f"·'), finish="length")
    assert not any(isinstance(event, CallEnd) for event in events)


def test_reasoning_tokens_are_those_within_think() -> None:
    thought = TOKENIZER.encode_text("the tool reads a file")
    _, completion = parse(TOKENIZER, [*thought, *ids_of("⟩think·⟨response·yes⟩response·⟩message·■")])
    assert completion.usage.reasoning_tokens == len(thought)
    assert completion.usage.completion_tokens == len(completion.ids)


@pytest.mark.parametrize(
    ("sampled", "closing"),
    [
        ("a", "⟩think·⟨response·⟩response·⟩message·■"),
        ("a⟩thi", "nk·⟨response·⟩response·⟩message·■"),
        ("a⟩think·⟨", "response·⟩response·⟩message·■"),
        ("a⟩think·⟨response·b⟩response·⟨", "tools·⟩tools·⟩message·■"),
        ('a⟩think·⟨tools·⟨call tool="f" ind', '=""·⟩call·⟩tools·⟩message·■'),
        ('a⟩think·⟨tools·⟨call tool="f', '"·⟩call·⟩tools·⟩message·■'),
        ("a⟩think·⟨response·b⟩response·⟩message·", "■"),
    ],
)
def test_closing(sampled: str, closing: str) -> None:
    _, completion = parse(TOKENIZER, ids_of(sampled), finish="length")
    names = {OPEN_ID: "⟨", CLOSE_ID: "⟩", SEP_ID: "·", END_ID: "■"}
    assert "".join(names.get(id) or TOKENIZER.decode([id]) for id in completion.closing) == closing
