"""What training a draft for a target takes: sizes, memory and time, from its `config.json` alone.

Counted by products of matrices; norms, biases and the vision tower are left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.training.geometry import Geometry
from speculative.draft import DraftError

_ADAM_BYTES: Final = 16
"""Of a parameter: float32 weight, gradient and two moments."""
_GIB: Final = 1 << 30
_EXPERT_BITS: Final[Mapping[str, float]] = {"mxfp4-pack-quantized": 4.25}
"""Of a routed expert's weight by the format of its quantisation; 16 otherwise."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run is made of: batches of `tokens`, `anchors` blocks for every 1,024 of them; and the machine:
    dense bfloat16 `flops` of a GPU, how many there are, and the share of them that is reached."""

    steps: int
    tokens: int
    anchors: int
    flops: float = 989e12
    gpus: int = 1
    utilisation: float = 0.3

    def __post_init__(self) -> None:
        assert min(self.steps, self.tokens, self.anchors, self.gpus) > 0
        assert self.flops > 0 and 0 < self.utilisation <= 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a draft for a large target; widths are the target's."""

    layers: int = 5
    heads: int = 64
    kv_heads: int = 16
    head_dim: int = 64
    intermediate_size: int = 14336
    markov_rank: int = 256
    block_size: int = 7
    taps: int = 5

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0


def draft_parameters(geometry: Geometry, sizes: Sizes) -> dict[str, int]:
    """Of the draft's own parts."""
    hidden, vocabulary = geometry.hidden_size, geometry.vocab_size
    attention = hidden * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)
    feed_forward = 3 * hidden * sizes.intermediate_size
    return {
        "projection": sizes.taps * hidden * hidden,
        "layers": sizes.layers * (attention + feed_forward),
        "markov_head": 2 * vocabulary * sizes.markov_rank,
        "confidence_head": hidden + sizes.markov_rank + 1,
    }


def target_parameters(geometry: Geometry) -> tuple[int, int, int]:
    """All, those in routed experts, and those that a token uses."""
    hidden, heads = geometry.hidden_size, geometry.num_attention_heads
    inner = geometry.kda_heads * geometry.kda_head_dim
    kda = hidden * (5 * inner + geometry.kda_head_dim + geometry.kda_heads) + geometry.kda_head_dim * inner
    nope, shared, value = geometry.qk_nope_head_dim, geometry.qk_rope_head_dim, geometry.v_head_dim
    latent = (
        hidden * (geometry.q_lora_rank + geometry.kv_lora_rank + shared)
        + geometry.q_lora_rank * heads * (nope + shared)
        + geometry.kv_lora_rank * heads * (nope + value)
        + 2 * hidden * heads * value
    )
    full = len(geometry.full_attention_layers)
    attention = full * latent + (geometry.num_hidden_layers - full) * kda
    expert = 3 * geometry.moe_intermediate_size * geometry.routed_expert_hidden_size
    shared_experts = 3 * hidden * geometry.moe_intermediate_size * geometry.num_shared_experts
    beside = 2 * hidden * geometry.routed_expert_hidden_size + hidden * geometry.num_experts + shared_experts
    dense = geometry.first_k_dense_replace
    sparse = geometry.num_hidden_layers - dense
    common = (
        attention
        + sparse * beside
        + dense * 3 * hidden * geometry.intermediate_size
        + 2 * geometry.vocab_size * hidden
    )
    routed = sparse * geometry.num_experts * expert
    return common + routed, routed, common + sparse * geometry.num_experts_per_token * expert


def plan(target: Path, sizes: Sizes, load: Workload) -> dict[str, Any]:
    """Sizes, memory and time. Raises `DraftError` for a directory (or file) without a K3's configuration."""
    path = target / "config.json" if target.is_dir() else target
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        geometry = Geometry.of(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftError(f"{path}: no configuration of a Kimi K3 ({error!r}); give a checkpoint") from error
    text: dict[str, Any] = config.get("text_config", config)
    stored_as = str((text.get("quantization_config") or {}).get("format", "bfloat16"))
    hidden, vocabulary = geometry.hidden_size, geometry.vocab_size
    parts = draft_parameters(geometry, sizes)
    own = sum(parts.values())
    whole, routed, active = target_parameters(geometry)
    blocks = load.anchors * load.tokens // 1024
    queries = blocks * sizes.block_size
    per_expert = _EXPERT_BITS.get(stored_as, 16.0) / 8
    # Forward: two a weight and token. The draft's context passes the projection and the keys and values.
    context = parts["projection"] + sizes.layers * 2 * hidden * sizes.kv_heads * sizes.head_dim
    trained = parts["layers"] + 2 * vocabulary * sizes.markov_rank
    flops = {
        "target_forward": 2.0 * active * load.tokens,
        "target_logits": 2.0 * vocabulary * hidden * queries,
        "draft_context": 6.0 * context * load.tokens,
        "draft_blocks": 6.0 * trained * queries,
        # Forward, and backward to the input: the head itself is the target's.
        "draft_logits": 4.0 * vocabulary * hidden * queries,
    }
    seconds = sum(flops.values()) / (load.flops * load.gpus * load.utilisation)
    memory = {
        "target_weights": (whole - routed) * 2 + routed * per_expert,
        "draft_weights_and_optimizer": own * _ADAM_BYTES,
        "features": load.tokens * sizes.taps * hidden * 2,
        # Logits of both, their softmax and the gradient, float32; blocks a batch can be cut to save them.
        "logits": 4 * 4 * queries * vocabulary,
    }
    return {
        "target": str(target),
        "target_parameters": whole,
        "target_active_parameters": active,
        "target_experts_stored_as": stored_as,
        "draft_parameters": {**parts, "own": own, "borrowed": 2 * vocabulary * hidden},
        "draft_bfloat16_gib": round(own * 2 / _GIB, 3),
        "captured_bytes_a_token": sizes.taps * hidden * 2,
        "batch": {"tokens": load.tokens, "blocks": blocks, "positions": queries},
        "memory_gib": {name: round(size / _GIB, 2) for name, size in memory.items()},
        "tflop_a_step": {name: round(value / 1e12, 2) for name, value in flops.items()},
        "seconds_a_step": round(seconds, 3),
        "hours": round(seconds * load.steps / 3600, 2),
        "assumed": {
            "steps": load.steps,
            "gpus": load.gpus,
            "flops_a_gpu": load.flops,
            "utilisation": load.utilisation,
        },
    }


def show(result: Mapping[str, Any]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "of it", "size", title=f"training a draft for {result['target']}: nothing was run")
    table.add_row("target", "parameters", f"{result['target_parameters']:,}")
    table.add_row("", "used by a token", f"{result['target_active_parameters']:,}")
    table.add_row("", "experts stored as", result["target_experts_stored_as"])
    for name, count in result["draft_parameters"].items():
        table.add_row("draft", name.replace("_", " "), f"{count:,}")
    table.add_row("", "in bfloat16", f"{result['draft_bfloat16_gib']} GiB")
    table.add_row("capture", "a token", f"{result['captured_bytes_a_token']:,} bytes")
    for name, count in result["batch"].items():
        table.add_row("batch", name, f"{count:,}")
    for name, size in result["memory_gib"].items():
        table.add_row("memory", name.replace("_", " "), f"{size:,} GiB")
    for name, size in result["tflop_a_step"].items():
        table.add_row("arithmetic a step", name.replace("_", " "), f"{size:,} TFLOP")
    table.add_row("time", "a step", f"{result['seconds_a_step']} s")
    assumed = result["assumed"]
    table.add_row("", f"{assumed['steps']:,} steps", f"{result['hours']} hours")
    console = Console()
    console.print(table)
    console.print(
        f"assumed: {assumed['gpus']} GPUs of {assumed['flops_a_gpu'] / 1e12:.0f} TFLOP/s at "
        f"{assumed['utilisation']:.0%}; rollouts, which an engine writes, are not in the time"
    )
