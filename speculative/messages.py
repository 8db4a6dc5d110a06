"""What stands in an assistant message that a model wrote: its calls, and what each token belongs to.

The tags are those of `model.encoding`; only special ids are markup. A message that is none (a model can
sample anything) has no calls.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.encoding import CLOSE, OPEN, SEP
from model.tokenizer import K3Tokenizer
from model.training.documents import Kind

_ATTRIBUTE: Final = re.compile(r' (\w+)="([^"]*)"')
_KINDS: Final = {
    "think": Kind.THINK,
    "response": Kind.RESPONSE,
    "tools": Kind.CALL,
    "call": Kind.CALL,
    "argument": Kind.ARGUMENT,
}


@dataclass(slots=True)
class _Call:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Message:
    """A message as read: its calls as in the chat API, and the kind of each token."""

    calls: list[dict[str, Any]]
    kinds: list[Kind]


def read(tokenizer: K3Tokenizer, ids: Sequence[int], first_call: int = 0) -> Message:
    """Read the ids of a message, from behind its generation prompt (in `think`) on.

    Calls get the ids `call_<n>`, counted from `first_call`.
    """
    markup = tokenizer.markup
    opens, closes, seps = markup[OPEN], markup[CLOSE], markup[SEP]
    stack, kinds, calls = ["think"], list[Kind](), list[_Call]()
    tag: list[int] | None = None
    is_opening = False
    argument: tuple[str, str] | None = None
    text: list[int] = []
    for token in ids:
        kind = _KINDS.get(stack[-1], Kind.RESPONSE) if stack else Kind.RESPONSE
        # An argument's tags are the call's: only its value is copied or made up.
        kinds.append(Kind.CALL if kind is Kind.ARGUMENT and (tag is not None or token == closes) else kind)
        if token in (opens, closes):
            tag, is_opening = [], token == opens
        elif token == seps and tag is not None:
            name, _, rest = tokenizer.decode(tag).partition(" ")
            attributes = dict(_ATTRIBUTE.findall(" " + rest))
            tag = None
            if is_opening:
                stack.append(name)
                if name == "call":
                    calls.append(_Call(attributes.get("tool", "")))
                elif name == "argument":
                    argument, text = (attributes.get("key", ""), attributes.get("type", "")), []
            elif name in stack:
                if name == "argument" and argument is not None and calls:
                    calls[-1].arguments[argument[0]] = _value(tokenizer.decode(text), argument[1])
                while stack.pop() != name:
                    pass
        elif tag is not None:
            tag.append(token)
        elif argument is not None:
            text.append(token)
    return Message(
        [
            {
                "id": f"call_{first_call + n}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for n, call in enumerate(calls)
        ],
        kinds,
    )


SEGMENTS: Final[Mapping[Kind, str]] = {
    Kind.THINK: "thinking",
    Kind.CALL: "calls",
    Kind.ARGUMENT: "arguments",
    Kind.RESPONSE: "prose",
}
COPIED: Final = "copied"
_COPIED_TOKENS: Final = 4


def segments(
    tokenizer: K3Tokenizer, ids: NDArray[np.int16], written: NDArray[np.bool_]
) -> list[tuple[str, ...]]:
    """What each token of a text [S] belongs to, when the model wrote it.

    One of `thinking`, `calls` (tags and the tools' names), `arguments` (their values) and `prose`; also
    `copied` when it ends four tokens that stand earlier in what users and tools said.
    """
    listed: list[int] = ids.tolist()
    found: list[tuple[str, ...]] = [()] * len(listed)
    heard: set[tuple[int, ...]] = set()
    edges = np.flatnonzero(np.diff(written.astype(np.int8), prepend=1 - int(written[0]), append=2))
    for start, end in itertools.pairwise((*map(int, edges[:-1]), len(listed))):
        grams = {at: tuple(listed[at - _COPIED_TOKENS + 1 : at + 1]) for at in range(start, end)}
        if not written[start]:
            heard |= set(grams.values())
            continue
        for at, kind in enumerate(read(tokenizer, listed[start:end]).kinds, start):
            is_copied = at - start + 1 >= _COPIED_TOKENS and grams[at] in heard
            found[at] = (SEGMENTS[kind], COPIED) if is_copied else (SEGMENTS[kind],)
    return found


def _value(text: str, type_name: str) -> Any:
    if type_name == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
