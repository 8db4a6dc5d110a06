"""How a turn is sampled: what a request may set, and SGLang's `sampling_params` made of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from service.errors import ContextTooLong
from service.fields import Fields

MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 300
_INT64: Final = 2**63 - 1
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def checkpoint_defaults(model: Path) -> dict[str, float]:
    """What the checkpoint's generation_config.json says for parameters that a request leaves out.

    `/generate` does not apply them by itself. A missing or unreadable file gives none.
    """
    try:
        document: object = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    values: Mapping[str, Any] = document  # pyright: ignore[reportUnknownVariableType] # its values are checked below
    return {
        name: values[name]
        for name in _DEFAULTS
        if isinstance(values.get(name), int | float) and not isinstance(values[name], bool)
    }


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's sampling.

    parameters: those of SGLang that pass as they are, by SGLang's names.
    max_tokens: most tokens to generate, reasoning included; None for as many as fit.
    stops: strings that end the visible text; matched by the gateway, in the text alone (see `service.stops`).
    top_logprobs: None for no logprobs at all.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        assert self.max_tokens is None or self.max_tokens >= 1
        assert self.min_tokens >= 0
        assert all(self.stops)

    def engine_parameters(self, room_tokens: int) -> dict[str, Any]:
        """SGLang's `sampling_params`, with room for `room_tokens` of output (at least 1)."""
        assert room_tokens >= 1
        limit = room_tokens if self.max_tokens is None else min(self.max_tokens, room_tokens)
        return {
            **self.parameters,
            "max_new_tokens": limit,
            "min_new_tokens": min(self.min_tokens, limit),
            "ignore_eos": self.ignore_eos,
        }


def output_room(
    prompt_tokens: int, *, max_prompt_tokens: int, max_request_tokens: int, context_tokens: int
) -> int:
    """How many tokens fit behind a prompt. Raises ContextTooLong when the prompt itself does not."""
    if prompt_tokens > max_prompt_tokens:
        raise ContextTooLong(
            context_tokens=context_tokens, prompt_tokens=prompt_tokens, limit_tokens=max_prompt_tokens
        )
    return max_request_tokens - prompt_tokens - 1


def read_sampling(
    fields: Fields,
    defaults: Mapping[str, float],
    vocabulary: int,
    *,
    stops: str = "stop",
    limits: Sequence[str] = ("max_completion_tokens", "max_tokens"),
    logprobs: bool | None = None,
) -> Sampling:
    """Read the sampling fields that the APIs and their dialects share. Raises InvalidRequest.

    Beyond OpenAI's: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`. `stops` is the
    name of the field that holds the stop strings, `limits` are those of the field that bounds the output,
    the first that is given counts. `logprobs`: whether they are asked for, where the API has no such field.
    """
    given = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1, above=True),
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, 2, above=True),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "sampling_seed": fields.integer("seed", -_INT64, _INT64),
        "logit_bias": _logit_bias(fields, vocabulary),
    }
    given_limits = [fields.integer(name, 1, _INT64) for name in limits]
    return Sampling(
        parameters={**defaults, **{name: value for name, value in given.items() if value is not None}},
        max_tokens=next((limit for limit in given_limits if limit is not None), None),
        min_tokens=fields.integer("min_tokens", 0, _INT64) or 0,
        ignore_eos=fields.boolean("ignore_eos") or False,
        stops=_stops(fields, stops),
        top_logprobs=_top_logprobs(fields, logprobs),
    )


def _top_k(fields: Fields) -> int | None:
    top_k = fields.integer("top_k", -1, _INT64)
    return -1 if top_k == 0 else top_k  # both spellings of "all of them" are in use


def _stops(fields: Fields, name: str) -> tuple[str, ...]:
    stop = fields.values.get(name)
    stops = [stop] if isinstance(stop, str) else fields.strings(name)
    if len(stops) > MAX_STOPS:
        raise fields.error(name, f"at most {MAX_STOPS} stop strings are taken, not {len(stops)}.")
    if not all(stops):
        raise fields.error(name, "a stop string must not be empty: leave it out.")
    return tuple(stops)


def _top_logprobs(fields: Fields, wanted: bool | None) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs") if wanted is None else wanted:
        return top or 0
    if top:
        raise fields.error("top_logprobs", "needs logprobs: set logprobs to true.")
    return None


def _logit_bias(fields: Fields, vocabulary: int) -> dict[str, float] | None:
    biases = fields.nested("logit_bias")
    if biases is None or not biases.values:
        return None
    if len(biases.values) > MAX_LOGIT_BIASES:
        raise fields.error("logit_bias", f"at most {MAX_LOGIT_BIASES} tokens are taken.")
    for token in biases.values:
        # isdecimal takes other scripts' digits too; int reads those, but SGLang's key must be plain.
        if not (token.isascii() and token.isdecimal() and len(token) <= 9 and int(token) < vocabulary):
            raise fields.error("logit_bias", f"a key must be a token id below {vocabulary}, as a string.")
    return {str(int(token)): biases.number(token, -100, 100) or 0.0 for token in biases.values}
