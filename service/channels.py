"""K3's output channels, parsed token by token into reasoning, text and tool calls.

Structure is decided by token id alone: text that spells `<|open|>` stays text, and a special token never
becomes text. A message as K3 writes it is what `model.encoding` writes for an assistant message from its
first channel on, up to `<|end_of_msg|>`. The tags and attributes are those that SGLang's `kimi_k3` parsers
read (`function_call/kimik3_detector.py`, `parser/reasoning_parser.py`, version 0.5.23).

A model can sample anything. What follows is done with anything else; nothing raises:

- A tag is `<|open|>` or `<|close|>`, a name and attributes, `<|sep|>`. As soon as it can become no tag of
  K3's, its text goes to where text goes, and its markers are dropped. So is every other special token.
- Text goes to the innermost open element: `think` gives reasoning, `response` and the space between channels
  give text, `argument` and `json` give arguments. Text in `tools` or `call` beside their elements is dropped.
- Opening a channel closes whatever is open, so thinking that was never closed ends where the response or the
  tools begin. A second `think`, `response` or `tools` continues the first.
- `call` outside `tools` is a call. Without a tool's name it is none, and what is in it is dropped.
- `argument` or `json` outside a call does not exist: its text belongs to the element around it.
- Closing an element closes what is open in it; closing one that is not open does nothing, with one exception:
  `<|close|>response` within thinking, before any response, means that the model skipped its thinking. What
  was given as reasoning is given once more as text (SGLang does so too), so the answer is not lost.
- `<|end_of_msg|>` completes what is open. Any other end (length, stop string, abort, `[EOS]`) leaves a call's
  arguments where they were cut, without `CallEnd`; a tag that was cut is dropped, as are the bytes of half a
  character. `Completion.closing` then closes what the sampler left open: the rest of the cut tag, K3's
  closing tags from the inside out, an empty `response` when there is none yet, `<|end_of_msg|>`.
- Ids after `<|end_of_msg|>` (a replay that ignores it) continue the same message.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model.encoding import CLOSE, END_OF_MESSAGE, OPEN, SEP, Segment
from model.tokenizer import IncrementalDecoder, K3Tokenizer
from service import call_arguments
from service.conversation import Completion, Finish, ToolCall, Usage, mint_call_id
from service.elements import TAGS, Tag, entered_by, inside, left_by

Channel = Literal["think", "response", "message"]
"""Where the generation prompt left off: in `think` or `response`, or in the message before any channel."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the `think` channel."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the `response` channel."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the message's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments; the fragments of one call joined are its JSON text."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call's arguments are complete."""

    index: int


ChannelEvent = ReasoningDelta | TextDelta | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class _Call:
    index: int
    id: str
    name: str
    arguments: call_arguments.CallArguments
    fragments: list[str]


class ChannelParser:
    """Token ids in, events out. What `completion` returns is what the events said, joined."""

    def __init__(
        self,
        tokenizer: K3Tokenizer,
        *,
        channel: Channel = "think",
        mint_call_id: Callable[[], str] = mint_call_id,
    ) -> None:
        self._tokenizer = tokenizer
        self._mint_call_id = mint_call_id
        self._markup_ids = frozenset(tokenizer.markup.values())
        self._open_id, self._close_id, self._sep_id, self._end_id = (
            tokenizer.markup[text] for text in (OPEN, CLOSE, SEP, END_OF_MESSAGE)
        )
        self._decoder = IncrementalDecoder(tokenizer)
        self._elements = ["message"] if channel == "message" else ["message", channel]
        self._tag: Tag | None = None
        self._opened: set[str] = {channel}
        self._thinking_since = 0
        self._finished = False
        self._ids: list[int] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[_Call] = []
        self._call: _Call | None = None
        self._events: list[ChannelEvent] = []
        self.reasoning_tokens = 0
        """Sampled ids that stood within `think`, its markers left out."""

    def feed(self, ids: Sequence[int]) -> list[ChannelEvent]:
        """Take the next sampled ids, special ones included. Never raises on malformed structure."""
        assert not self._finished, "no ids come after finish()"
        self._ids += ids
        run: list[int] = []
        for id in ids:
            if not self._is_text(id):
                self._take_text(run)
                run = []
                self._take_marker(id)
            elif self._tag is not None:  # one by one: each may show that it is no tag
                self._take_text([id])
            else:
                run.append(id)
        self._take_text(run)
        return self._drain()

    def finish(self) -> list[ChannelEvent]:
        """The last events, once no more ids come. Calling it again gives nothing."""
        if not self._finished and self._call is not None:
            self._add_arguments(self._call.arguments.cut())
        self._finished = True
        return self._drain()

    def completion(self, finish: Finish, usage: Usage | None = None) -> Completion:
        """Everything that was parsed. A `stop` of a message with calls is returned as `tool_calls`.

        `usage` is completed by the counts that the parser knows.
        """
        assert self._finished, "call finish() first"
        return Completion(
            reasoning="".join(self._reasoning),
            text="".join(self._text),
            calls=tuple(ToolCall(call.id, call.name, "".join(call.fragments)) for call in self._calls),
            ids=tuple(self._ids),
            finish="tool_calls" if finish == "stop" and self._calls else finish,
            usage=replace(
                usage or Usage(),
                completion_tokens=len(self._ids),
                reasoning_tokens=self.reasoning_tokens,
            ),
            closing=tuple(self._tokenizer.encode_segments(self._closing())),
        )

    def _is_text(self, id: int) -> bool:
        if id in self._markup_ids:
            return False
        try:
            self._tokenizer.token_bytes(id)
        except KeyError:  # the engine's embedding may have more rows than the vocabulary
            return False
        return True

    def _take_text(self, run: list[int]) -> None:
        if run:
            if self._tag is None and self._elements and self._elements[-1] == "think":
                self.reasoning_tokens += len(run)
            self._add_text(self._decoder.feed(run))

    def _take_marker(self, id: int) -> None:
        self._add_text(self._decoder.finish())
        if self._tag is not None:
            tag, self._tag = self._tag, None
            if id == self._sep_id and tag.is_complete():
                self._apply(tag)
                return
            self._add_text(tag.text)
        if id in (self._open_id, self._close_id):
            self._tag = Tag(opens=id == self._open_id)
        elif id == self._end_id:
            self._leave(len(self._elements))

    def _apply(self, tag: Tag) -> None:
        if not tag.opens:
            self._close(tag.name)
            return
        left = left_by(self._elements, tag.name)
        if left is None:
            return
        self._leave(left)
        if tag.name == "message":
            self._elements = ["message"]
            return
        if tag.name == "call":
            self._open_call(tag.attributes().get("tool", ""))
        elif tag.name in ("argument", "json") and self._call is not None:
            arguments, attributes = self._call.arguments, tag.attributes()
            self._add_arguments(
                arguments.open_json()
                if tag.name == "json"
                else arguments.open_argument(attributes.get("key", ""), attributes.get("type", "string"))
            )
        elif tag.name == "think":
            self._thinking_since = len(self._reasoning)
        self._opened.add(tag.name)
        self._elements += entered_by(self._elements, tag.name)

    def _close(self, name: str) -> None:
        if name in self._elements:
            self._leave(inside(self._elements, name))
        elif name == "response" and self._elements[-1:] == ["think"] and "response" not in self._opened:
            skipped = "".join(self._reasoning[self._thinking_since :])
            self._opened.add("response")
            self._leave(1)
            self._emit(TextDelta(skipped))

    def _leave(self, count: int) -> None:
        for _ in range(count):
            element = self._elements.pop()
            if self._call is None:
                continue
            if element in ("argument", "json"):
                self._add_arguments(self._call.arguments.close_value())
            elif element == "call":
                self._add_arguments(self._call.arguments.close())
                self._emit(CallEnd(self._call.index))
                self._call = None

    def _open_call(self, name: str) -> None:
        if not name:
            return
        call = _Call(len(self._calls), self._mint_call_id(), name, call_arguments.CallArguments(), [])
        self._calls.append(call)
        self._call = call
        self._emit(CallStart(call.index, call.id, name))

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._tag is not None:
            self._tag.text += text
            if self._tag.is_possible():
                return
            text, self._tag = self._tag.text, None
        match self._elements[-1] if self._elements else "message":
            case "think":
                self._emit(ReasoningDelta(text))
            case "response" | "message":
                self._emit(TextDelta(text))
            case "argument" | "json" if self._call is not None:
                self._add_arguments(self._call.arguments.feed(text))
            case _:
                pass

    def _add_arguments(self, fragment: str) -> None:
        if fragment and self._call is not None:
            self._call.fragments.append(fragment)
            self._emit(CallArguments(self._call.index, fragment))

    def _emit(self, event: ChannelEvent) -> None:
        match event, self._events[-1] if self._events else None:
            case (ReasoningDelta(text), ReasoningDelta(before)):
                self._events[-1] = ReasoningDelta(before + text)
            case (TextDelta(text), TextDelta(before)):
                self._events[-1] = TextDelta(before + text)
            case (CallArguments(index, text), CallArguments(last, before)) if index == last:
                self._events[-1] = CallArguments(index, before + text)
            case _:
                self._events.append(event)
        if isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, TextDelta):
            self._text.append(event.text)

    def _drain(self) -> list[ChannelEvent]:
        events, self._events = self._events, []
        return events

    def _closing(self) -> Iterator[Segment]:
        if self._ids[-1:] == [self._end_id]:
            return
        elements, opened = list(self._elements), set(self._opened)
        if (tag := self._tag) is not None:
            name = tag.name if tag.is_complete() else self._intended(tag)
            yield tag.rest(name), False
            yield SEP, True
            if tag.opens:
                left = left_by(elements, name)
                if left is not None:
                    del elements[len(elements) - left :]
                    elements += entered_by(elements, name)
                opened.add(name)
            elif name in elements:
                del elements[len(elements) - inside(elements, name) :]
        while elements:
            element = elements.pop()
            if element == "message" and opened.isdisjoint(("response", "tools")):
                yield from ((OPEN, True), ("response", False), (SEP, True))
                yield from ((CLOSE, True), ("response", False), (SEP, True))
            yield from ((CLOSE, True), (element, False), (SEP, True))
        yield END_OF_MESSAGE, True

    def _intended(self, tag: Tag) -> str:
        """The tag that a cut one most likely was."""
        if tag.opens:
            inner = {"tools": "call", "call": "argument"}.get(self._elements[-1] if self._elements else "")
            after = "tools" if "response" in self._opened else "response"
            likely = (*((inner,) if inner else ()), after, *TAGS)
        else:
            likely = (*reversed(self._elements), *TAGS)
        return next(name for name in likely if name.startswith(tag.text))
