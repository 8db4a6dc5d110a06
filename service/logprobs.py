"""Log probabilities of sampled tokens as OpenAI's APIs write them."""

from typing import Any, Final

from model.tokenizer import K3Tokenizer
from service.generation import TokenLogprob

# JSON has no -inf: OpenAI's documentation says -9999 for what is very unlikely.
_LEAST_LOGPROB: Final = -9999.0


def logprob_body(tokenizer: K3Tokenizer, item: TokenLogprob) -> dict[str, Any]:
    """A token with its text, bytes and log probability, and the likeliest ones at its place."""
    return {
        **_token(tokenizer, item.id, item.logprob),
        "top_logprobs": [_token(tokenizer, id, logprob) for id, logprob in item.top],
    }


def _token(tokenizer: K3Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    try:
        raw = tokenizer.token_bytes(id)
    except KeyError:  # the engine's embedding may have more rows than the vocabulary
        raw = b""
    return {
        "token": raw.decode(errors="replace"),
        "bytes": list(raw),
        "logprob": max(logprob, _LEAST_LOGPROB),
    }
