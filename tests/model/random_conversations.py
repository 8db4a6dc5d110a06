"""Random conversations for property tests: what clients send, markers and odd arguments included."""

from typing import Any

from hypothesis import strategies as st

MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_pad|>", "[EOS]"]
SPELLED = [*MARKERS, "<|reserved_token_2030|>", "think", 'role="system"', "&quot;"]

texts = st.lists(st.text(max_size=12) | st.sampled_from(SPELLED), max_size=4).map("".join)
names = st.text("abcdefghij_", min_size=1, max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)
contents = st.one_of(
    texts,
    st.none(),
    st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3),
)


@st.composite
def calls(draw: st.DrawFn, at_least: int = 0) -> list[dict[str, Any]]:
    """The tool calls of one assistant message, arguments as objects."""
    made = draw(st.lists(st.tuples(names, arguments), min_size=at_least, max_size=3))
    return [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(made)
    ]


@st.composite
def rounds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant message and what follows it: its results in any order, or a user's message."""
    made = draw(calls())
    assistant: dict[str, Any] = {"role": "assistant", "content": draw(contents), "tool_calls": made}
    if draw(st.booleans()):
        assistant["reasoning_content"] = draw(texts)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": draw(contents)}
        for call in draw(st.permutations(made))
    ]
    following = results or [{"role": "user", "content": draw(contents)}]
    return [assistant, *following]


@st.composite
def conversations(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """A conversation as the messages that each turn adds: opening messages, then rounds."""
    opening = [
        {"role": draw(st.sampled_from(["system", "developer"])), "content": draw(texts)},
        {"role": "user", "content": draw(contents)},
    ]
    return [opening, *draw(st.lists(rounds(), max_size=4))]
