"""Watching the engines: are they there, and do they render conversations to the very tokens that we render?

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
from service.engines import Engines
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


@dataclass(slots=True)
class Watched:
    """What is known of one engine. `verified` None: not compared, or it could not be asked."""

    engine: Engine
    ready: bool = False
    verified: bool | None = None
    mismatches: tuple[str, ...] = ()


class EngineWatch:
    """What is known of the engines."""

    def __init__(self, engines: Engines, tokenizer: K3Tokenizer, metrics: Metrics) -> None:
        self._watched = [Watched(engine) for engine in engines.engines]
        self._tokenizer = tokenizer
        self._metrics = metrics

    @property
    def verified(self) -> bool | None:
        """Whether every engine that could be asked renders as we do; None when none could be."""
        known = [watched.verified for watched in self._watched if watched.verified is not None]
        return all(known) if known else None

    @property
    def mismatches(self) -> tuple[str, ...]:
        """The samples that any engine renders otherwise."""
        return tuple(dict.fromkeys(name for watched in self._watched for name in watched.mismatches))

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as watching:
            for watched in self._watched:
                watching.create_task(self._watch(watched))

    async def _watch(self, watched: Watched) -> None:
        while True:
            was_ready, watched.ready = watched.ready, await watched.engine.ready()
            self._metrics.engine_ready.labels(watched.engine.name).set(watched.ready)
            if watched.ready and (watched.verified is None or not was_ready):
                await self._verify(watched)
            elif was_ready and not watched.ready:
                log.warning("engine %s is gone", watched.engine.name)
            await asyncio.sleep(_PRESENT_POLL_S if watched.ready else _ABSENT_POLL_S)

    async def _verify(self, watched: Watched) -> None:
        engine = watched.engine
        try:
            info = await engine.info()
            mismatches = [
                sample.name for sample in SAMPLES if not await self._agrees(engine, sample, info.model)
            ]
        except EngineError as error:
            watched.verified = None
            log.warning("engine %s did not render the samples: %r", engine.name, error)
            return
        watched.verified, watched.mismatches = not mismatches, tuple(mismatches)
        self._metrics.encoding_verified.set(bool(self.verified))
        if mismatches:
            log.error(
                "PROMPTS DIFFER: engine %s renders other tokens than this gateway for %s. Give both the "
                "same checkpoint (--model). Until then answers are not to be trusted.",
                engine.name,
                ", ".join(mismatches),
            )
        else:
            log.info(
                "engine %s, %s (SGLang %s), renders the same tokens", engine.name, info.model, info.version
            )

    async def _agrees(self, engine: Engine, sample: Sample, model: str) -> bool:
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
        return ours == await engine.tokenize(request)
