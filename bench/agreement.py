"""How near an engine's logits come to the trainer's network, over the prompts of held-out agent sessions.

The network runs in float32, and beside it with products in bfloat16, which says what that type costs by
itself: an engine that computes in bfloat16 can't come nearer than that.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from bench.engines import Engine, EngineFailure
from model.training.delta import CHUNK_TOKENS
from model.training.network import Network
from model.training.weights import load

_NOISE: Final = 2.0
"""Mean difference of log probabilities from which on an engine computes something else."""


class Scores(NamedTuple):
    """Of each token but a prompt's first: its log probability, and the token that was the likeliest."""

    logprobs: Tensor
    likeliest: Tensor


class Judge:
    """The trainer's network of a checkpoint, in the form that the trainer wrote."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._exact, self._rounded = (
            load(checkpoint, dtype).requires_grad_(False).to(device)
            for dtype in (torch.float32, torch.bfloat16)
        )

    def compare(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The engine beside the network.

        Raises `EngineFailure` where the engine gives no log probabilities, or noise.
        """
        exact = [_computed(self._exact, prompt) for prompt in prompts]
        rounded = [_computed(self._rounded, prompt) for prompt in prompts]
        engines = [_answered(engine, prompt) for prompt in prompts]
        found: dict[str, Any] = {
            "tokens": sum(len(scores.logprobs) for scores in exact),
            "engine": _difference(exact, engines),
            "network_bfloat16": _difference(exact, rounded),
        }
        if not found["engine"]["mean_difference"] < _NOISE:
            raise EngineFailure(f"the engine's logits are not those of {self._checkpoint}: {found}")
        return found


@torch.inference_mode()
def _computed(network: Network, prompt: Sequence[int]) -> Scores:
    device = network.lm_head.weight.device
    ids = torch.tensor(prompt, device=device)
    padded = torch.zeros(-(-len(prompt) // CHUNK_TOKENS) * CHUNK_TOKENS, dtype=torch.int64, device=device)
    padded[: len(prompt)] = ids
    hidden, _ = network(padded.unsqueeze(0))
    logprobs = network.lm_head(hidden[: len(prompt) - 1]).float().log_softmax(-1)
    written = logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return Scores(written.cpu(), logprobs.argmax(-1).cpu())


def _answered(engine: Engine, prompt: Sequence[int]) -> Scores:
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    meta = engine.ask(body)["meta_info"]
    # The first token has no probability; each entry begins with a log probability and a token.
    written = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    likeliest = [entries[0][1] for entries in meta["input_top_logprobs"][1:]]
    if len(written) != len(prompt) - 1 or len(likeliest) != len(written):
        raise EngineFailure(f"/generate gave {len(written)} log probabilities for {len(prompt)} tokens")
    # NaN travels as null.
    values = [float("nan") if value is None else value for value in written]
    return Scores(torch.tensor(values), torch.tensor(likeliest))


def _difference(exact: Sequence[Scores], other: Sequence[Scores]) -> dict[str, float]:
    pairs = list(zip(exact, other, strict=True))
    logprobs = torch.cat([one.logprobs - two.logprobs for one, two in pairs]).abs()
    equal = torch.cat([one.likeliest == two.likeliest for one, two in pairs])
    return {
        "mean_difference": round(float(logprobs.mean()), 6),
        "p99_difference": round(float(logprobs.quantile(0.99)), 6),
        "max_difference": round(float(logprobs.max()), 6),
        "likeliest_equal": round(float(equal.float().mean()), 5),
    }
