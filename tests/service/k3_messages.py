"""Assistant messages as hypothesis draws them, their tokens, and how the parser reads those."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from model.encoding import generation_segments, message_segments
from model.tokenizer import K3Tokenizer
from service.channels import Channel, ChannelEvent, ChannelParser
from service.conversation import Completion, Finish

SPELLED_MARKERS = ("<|open|>", "<|close|>response<|sep|>", "<|end_of_msg|>", "[EOS]")
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from((*SPELLED_MARKERS, " ", "\n", "the tool reads a file", "日本語", "👩‍👩‍👧", "é")),
    ),
    max_size=4,
).map("".join)
VISIBLE_TEXT = TEXT.filter(str.strip)
NAMES = st.sampled_from(("get_weather", "run", 'odd "name" & more', "エージェント"))
WHOLE = st.characters(exclude_categories=["Cs"])
NUMBERS = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(WHOLE, max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.text(WHOLE, max_size=8)
ARGUMENTS = st.one_of(
    st.dictionaries(KEYS, VALUES, max_size=4).map(lambda value: json.dumps(value, ensure_ascii=False)),
    st.sampled_from(('{"city": Paris', "not json", '{"a": "<|close|>')),
)


@st.composite
def assistant_messages(draw: st.DrawFn) -> dict[str, Any]:
    """An assistant message as the parser would return it."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(TEXT) or None}
    if reasoning := draw(st.one_of(st.just(""), VISIBLE_TEXT)):
        message["reasoning_content"] = reasoning
    names = draw(st.lists(NAMES, max_size=3))
    if names:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": draw(ARGUMENTS)},
            }
            for number, name in enumerate(names)
        ]
    return message


def sampled_ids(tokenizer: K3Tokenizer, message: dict[str, Any], *, thinking: bool = True) -> list[int]:
    """What the model samples to write the message, from the generation prompt on."""
    segments = message_segments(message, thinking=thinking)
    opening = generation_segments(thinking)
    assert segments[: len(opening)] == opening
    return tokenizer.encode_segments(segments[len(opening) :])


def numbered_ids() -> Any:
    """Call ids call_0, call_1, ..."""
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


def parse(
    tokenizer: K3Tokenizer,
    ids: Sequence[int],
    *,
    cuts: Sequence[int] = (),
    channel: Channel = "think",
    finish: Finish = "stop",
) -> tuple[list[ChannelEvent], Completion]:
    """Feed the ids in pieces, and return all events and the completion."""
    parser = ChannelParser(tokenizer, channel=channel, mint_call_id=numbered_ids())
    events: list[ChannelEvent] = []
    edges = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    for start, end in pairwise(edges):
        events += parser.feed(ids[start:end])
    events += parser.finish()
    assert parser.finish() == []
    return events, parser.completion(finish)
