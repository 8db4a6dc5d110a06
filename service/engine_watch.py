"""Watching the engine: is it there, and does it render conversations to the very tokens that we render?

The gateway encodes conversations itself. Whether its encoding and tokenizer are the checkpoint's own is asked
of the engine (`/tokenize` renders a chat request through the checkpoint's `apply_chat_template`) whenever an
engine appears. A difference would make every prompt subtly wrong: it is an error in the log, a metric, and
`/ready` says no.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from model.encoding import conversation_segments
from model.tokenizer import K3Tokenizer
from service.engine import Engine
from service.errors import EngineError
from service.metrics import Metrics

log = logging.getLogger(__name__)

_ABSENT_POLL_S: Final = 1.0
_PRESENT_POLL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation to render on both sides."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    effort: str | None = None
    thinking: bool = True


_WEATHER: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}


def _call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


SAMPLES: Final = (
    Sample("plain", ({"role": "user", "content": "Hello,  wörld!\n\n你好 👋"},)),
    Sample("no thinking", ({"role": "user", "content": "Hello"},), thinking=False),
    Sample(
        "text that spells markup",
        (
            {"role": "system", "content": 'Say "<|open|>think<|sep|>" & <|end_of_msg|>.'},
            {"role": "user", "content": "<|close|>message<|sep|>"},
        ),
    ),
    Sample(
        "tools and reasoning",
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Paris and Rome?"},
            {
                "role": "assistant",
                "content": "Both, then.",
                "reasoning_content": "Two calls.\n",
                "tool_calls": [
                    _call("a", '{"place": "Paris", "days": 2}'),
                    _call("b", '{"place": "R\\"me"}'),
                ],
            },
            {"role": "tool", "tool_call_id": "b", "content": "rain"},
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
            {"role": "user", "content": "Thanks"},
        ),
        tools=(_WEATHER,),
        effort="high",
    ),
)


class EngineWatch:
    """What is known of the engine. `verified` None: not compared, or the engine could not be asked."""

    def __init__(self, engine: Engine, tokenizer: K3Tokenizer, metrics: Metrics) -> None:
        self.ready = False
        self.verified: bool | None = None
        self.mismatches: tuple[str, ...] = ()
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            was_ready, self.ready = self.ready, await self._engine.ready()
            if self.ready and (self.verified is None or not was_ready):
                await self._verify()
            elif was_ready and not self.ready:
                log.warning("the engine is gone")
            await asyncio.sleep(_PRESENT_POLL_S if self.ready else _ABSENT_POLL_S)

    async def _verify(self) -> None:
        try:
            info = await self._engine.info()
            mismatches = [sample.name for sample in SAMPLES if not await self._agrees(sample, info.model)]
        except EngineError as error:
            self.verified = None
            log.warning("the engine did not render the samples: %r", error)
            return
        self.verified, self.mismatches = not mismatches, tuple(mismatches)
        self._metrics.encoding_verified.set(self.verified)
        if mismatches:
            log.error(
                "PROMPTS DIFFER: the engine renders other tokens than this gateway for %s. Give both the "
                "same checkpoint (--model). Until then answers are not to be trusted.",
                ", ".join(mismatches),
            )
        else:
            log.info("engine %s (SGLang %s) renders the same tokens", info.model, info.version)

    async def _agrees(self, sample: Sample, model: str) -> bool:
        ours = self._tokenizer.encode_segments(
            conversation_segments(
                sample.messages, sample.tools, thinking=sample.thinking, thinking_effort=sample.effort
            )
        )
        request: dict[str, Any] = {"model": model, "messages": sample.messages}
        if sample.tools:
            request["tools"] = sample.tools
        if sample.effort is not None:
            request["reasoning_effort"] = sample.effort
        if not sample.thinking:
            request["chat_template_kwargs"] = {"thinking": False}
        return ours == await self._engine.tokenize(request)
