"""What passes between the gateway and SGLang's `/generate`: requests out, events in.

The fields are those of SGLang 0.5.23 (`managers/io_struct.py`, `managers/tokenizer_manager.py`).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from service.errors import EngineFailed, EngineOverloaded, EngineUnavailable, InvalidRequest, ServiceError
from service.token_ids import TokenIds

log = logging.getLogger(__name__)

StopKind = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to `/generate`. `ids` are the prompt, `sampling` SGLang's `sampling_params`.

    highest: the highest of the ids, where their source knows it; looking for it takes milliseconds.
    images: data URLs, one for each `<|media_pad|>` of the ids.
    in_steps: whether each event is wanted as it came; else those that came together are read as one.
    """

    rid: str
    ids: Sequence[int]
    sampling: Mapping[str, Any]
    cache_salt: str
    top_logprobs: int | None = None
    highest: int | None = None
    images: Sequence[str] = ()
    in_steps: bool = True

    def body(self) -> bytes:
        """The JSON body."""
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": orjson.Fragment(self.ids.json()) if isinstance(self.ids, TokenIds) else self.ids,
            "sampling_params": self.sampling,
            "cache_salt": self.cache_salt,
            "stream": True,
        }
        if self.images:
            body["image_data"] = self.images
        if self.top_logprobs is not None:
            body["return_logprob"] = True
            body["top_logprobs_num"] = self.top_logprobs
        return orjson.dumps(body)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log probability, and the likeliest tokens at its place as (id, logprob)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What has come of the stream at once: new ids, and the end when `stop` is set."""

    ids: list[int]
    stop: StopKind | None = None
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


def read_chunks(events: Iterable[Mapping[str, Any]], *, in_steps: bool) -> Iterator[Chunk]:
    """Events that came together: a chunk each if `in_steps` or with log probabilities, else one chunk.

    Raises ServiceError for a refusal, a fault, and what makes no sense, after the chunk of what came before.
    """
    last: Chunk | None = None
    try:
        for event in events:
            chunk = _read_chunk(event)
            if last is not None:
                if in_steps or last.logprobs or chunk.logprobs:
                    yield last
                else:
                    chunk.ids[:0] = last.ids
            last = chunk
            if chunk.stop is not None:
                break
    except ServiceError:
        if last is not None:
            yield last
        raise
    if last is not None:
        yield last


def _read_chunk(event: Mapping[str, Any]) -> Chunk:
    """One event of the stream. Raises ServiceError."""
    if (error := event.get("error")) is not None:
        code = error.get("code") if isinstance(error, dict) else None  # pyright: ignore[reportUnknownMemberType]
        raise refusal(code if isinstance(code, int) else 500, str(error))  # pyright: ignore[reportUnknownArgumentType]
    try:
        meta = event["meta_info"]
        finish = meta["finish_reason"]
        details = meta.get("cached_tokens_details") or {"device": meta.get("cached_tokens", 0)}
        chunk = Chunk(
            ids=list(event["output_ids"]),
            stop=None if finish is None else _stop_kind(finish),
            cached_device_tokens=int(details.get("device", 0)),
            cached_host_tokens=int(details.get("host", 0)),
            cached_storage_tokens=int(details.get("storage", 0)),
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            logprobs=_read_logprobs(meta),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.error("the engine's stream holds an event that is not SGLang's: %r", error)
        raise EngineFailed from None
    return chunk


def _stop_kind(finish: Mapping[str, Any]) -> StopKind:
    match finish["type"]:
        case "length":
            return "length"
        case "stop" if finish.get("matched") != "NaN happened":
            return "stop"
        case "abort":
            raise refusal(finish.get("status_code") or 500, str(finish.get("message")))
        case kind:
            log.error("the engine ended a turn with %r: %r", kind, finish.get("matched"))
            raise EngineFailed


def _read_logprobs(meta: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """Read `output_token_logprobs`, [logprob, id, text] a token, and `output_top_logprobs`, lists of such."""
    sampled: list[Any] = meta.get("output_token_logprobs") or []
    tops: list[Any] = meta.get("output_top_logprobs") or [()] * len(sampled)
    return tuple(
        TokenLogprob(int(token), float(value), tuple((int(i), float(v)) for v, i, _ in top or ()))
        for (value, token, _), top in zip(sampled, tops, strict=True)
    )


def refusal(status: int, text: str) -> ServiceError:
    """The error for what the engine said; its text goes to the log alone."""
    log.warning("the engine refuses with %d: %.2000s", status, text)
    if status == 503:
        return EngineOverloaded() if "queue is full" in text or "priority" in text else EngineUnavailable()
    if status == 400 and "grammar" in text:
        return InvalidRequest(
            "The schema can't be enforced: the engine has no grammar for it. Simplify the tool's parameters "
            "or the response_format's schema (plain types, enum, required, items).",
            code="invalid_schema",
        )
    if status == 400 and "image" in text.lower():
        return InvalidRequest(
            "An image can't be read: it must be a whole PNG, JPEG, GIF or WebP.", code="invalid_image"
        )
    return EngineFailed()
