"""Which sizes of a K3 SGLang's GPU kernels can compute (0.5.23), and the next ones that they can.

- Attention residuals (`sglang/srt/layers/attn_residual.py`, `_mix_fused`) go through the hidden size in
  blocks of 1024. Of a smaller size they compute nothing and of another they read past its end, without an
  error: logits are noise or NaN.
- Decoding with a latent KV (`sglang/kernels/ops/attention/decode_attention.py`) splits keys of 256 + 32 and
  of 512 + 64 numbers, latent and shared key. For others it doesn't compile.

The released K3 has 7168, 512 and 64. This module imports neither torch nor SGLang.
"""

import json
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

HIDDEN_MULTIPLE: Final = 1024
LATENTS: Final = MappingProxyType({32: 256, 64: 512})
"""`kv_lora_rank` by `qk_rope_head_dim`."""


def fitting_hidden(hidden: int, *, exact: bool = False) -> int:
    """The least hidden size from `hidden` on that the kernels take; with `exact`, a multiple of `hidden`."""
    step = math.lcm(hidden, HIDDEN_MULTIPLE) if exact else HIDDEN_MULTIPLE
    return -(-hidden // step) * step


def fitting_latent(latent: int, shared_key: int) -> int | None:
    """The `kv_lora_rank` that holds `latent` and fits `qk_rope_head_dim`; None when the kernels have none."""
    fitting = LATENTS.get(shared_key)
    return fitting if fitting is not None and fitting >= latent else None


def complaint(model: Path, draft: Path | None = None) -> str | None:
    """Why a GPU can't compute the checkpoint directory `model`, or its draft, and what to do; None if it can.

    None as well for what is no K3 or can't be read: to say that is the engine's part.
    """
    text = _json(model).get("text_config", {})
    try:
        hidden, latent = int(text["hidden_size"]), int(text["kv_lora_rank"])
        shared_key = int(text["qk_rope_head_dim"])
    except (KeyError, TypeError, ValueError):
        return None
    fitting = fitting_latent(latent, shared_key)
    remedy = f"write a padded copy: longhaul model pad --model {model} --output DIR"
    if fitting is None:
        remedy = "no padding helps: take another checkpoint, or a profile for the CPU"
    if hidden != fitting_hidden(hidden):
        return (
            f"{model} has hidden_size {hidden}, and the attention residuals of SGLang's GPU kernels compute "
            f"multiples of {HIDDEN_MULTIPLE} alone (of others noise, without an error); {remedy}"
        )
    if latent != fitting:
        known = " or ".join(f"{rank} + {rope}" for rope, rank in LATENTS.items())
        return (
            f"{model} has kv_lora_rank {latent} + qk_rope_head_dim {shared_key}, and the MLA decoding of "
            f"SGLang's GPU kernels takes {known} alone; {remedy}"
        )
    drafted = hidden if draft is None else _json(draft).get("hidden_size", hidden)
    if drafted != hidden:
        return (
            f"the draft {draft} has hidden_size {drafted}, its target {model} has {hidden}: take the draft "
            "of this target; for a target that `longhaul model pad` wrote, pad it with the same options: "
            f"longhaul draft pad --draft {draft} --output DIR"
        )
    return None


def _json(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
