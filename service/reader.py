"""Reading the model's message from the engine's chunks: events out, stop strings and single calls heeded."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from model.tokenizer import K3Tokenizer
from service.channels import CallEnd, Channel, ChannelEvent, ChannelParser, TextDelta
from service.conversation import Completion, Usage
from service.generation import Chunk, StopKind, TokenLogprob
from service.sampling import Sampling
from service.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Step:
    """What came at once: events in their order, and, if asked for, the log probabilities of the text."""

    events: list[ChannelEvent] = field(default_factory=list[ChannelEvent])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])


class MessageReader:
    """One message. Feed it until `ended` or the engine stops, then `finish`, then take the `completion`.

    ended: the message is over although the engine goes on: a stop string was found, or, with `single_call`,
    the first tool call is complete.
    """

    def __init__(
        self, tokenizer: K3Tokenizer, channel: Channel, sampling: Sampling, *, single_call: bool = False
    ) -> None:
        self.ended = False
        self._parser = ChannelParser(tokenizer, channel=channel)
        self._stops = StopMatcher(sampling.stops) if sampling.stops else None
        self._single_call = single_call
        self._with_logprobs = sampling.top_logprobs is not None
        self._markers = frozenset(tokenizer.markup.values())
        self._undecided: list[TokenLogprob] = []
        self._text: list[str] = []
        self._sampled_tokens = 0

    def feed(self, chunk: Chunk) -> Step:
        """Read the chunk's ids. What follows the end of the message within the chunk is left out."""
        self._sampled_tokens += len(chunk.ids)
        if self._stops is None and not self._single_call and not self._with_logprobs:
            return Step(self._parser.feed(chunk.ids))
        step = Step()
        for position, token in enumerate(chunk.ids):
            events = self._parser.feed([token])
            if self._with_logprobs and position < len(chunk.logprobs):
                step.logprobs.extend(self._text_logprobs(chunk.logprobs[position], events))
            step.events.extend(self._heed(events))
            if self.ended:
                break
        return step

    def finish(self) -> Step:
        """The last events, once no more ids come."""
        step = Step(list(self._heed(self._parser.finish())))
        if self._stops is not None and self._stops.matched is None and (held := self._stops.flush()):
            self._text.append(held)
            step.events.append(TextDelta(held))
        return step

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the message."""
        return None if self._stops is None else self._stops.matched

    @property
    def sampled_tokens(self) -> int:
        """How many ids were fed."""
        return self._sampled_tokens

    def completion(self, stop: StopKind, usage: Usage) -> Completion:
        """The whole message, its ids exactly as sampled, and `usage` completed by the counts of its tokens.

        At a stop string the text ends before it, the ids behind it: the model saw what it sampled.
        """
        completion = self._parser.completion("stop" if self.ended else stop, usage)
        return completion if self._stops is None else replace(completion, text="".join(self._text))

    def _heed(self, events: Iterable[ChannelEvent]) -> Iterable[ChannelEvent]:
        for event in events:
            if isinstance(event, TextDelta) and self._stops is not None:
                if self._stops.matched is not None:
                    continue
                text = self._stops.feed(event.text)
                self.ended = self._stops.matched is not None
                if text:
                    self._text.append(text)
                    yield TextDelta(text)
            else:
                yield event
                if self._single_call and isinstance(event, CallEnd):
                    self.ended = True
                    return

    def _text_logprobs(self, logprob: TokenLogprob, events: list[ChannelEvent]) -> list[TokenLogprob]:
        """Keep the text's tokens alone: one that ends within a character shows only with the next event."""
        if logprob.id in self._markers:
            self._undecided.clear()
            return []
        self._undecided.append(logprob)
        if not events:
            return []
        decided, self._undecided = self._undecided, []
        return decided if any(isinstance(event, TextDelta) for event in events) else []
