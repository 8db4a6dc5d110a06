"""Pad a K3 to sizes that SGLang's GPU kernels compute: the same function, in more numbers.

A dimension of `old` numbers becomes one of `new` (`model.kernel_sizes`): as many whole copies of the old
numbers as fit, then zeros. What writes it writes all copies; what reads it reads the first alone. An RMSNorm
over it sees the mean of squares times `share = copies * old / new`, so that its weight is scaled by
`sqrt(share)`, and the epsilon, of which a K3 has one for all norms, counts as `epsilon / share`:

- Where `old` divides `new` (a latent of 128 -> 256, a hidden size of 256 -> 1024) the share is 1: nothing is
  scaled or rounded, and the function is exactly the same. `exact` asks for such a hidden size (384 -> 3072).
- A hidden size of 384 -> 1024 has two copies, a share of 3/4: epsilon counts 4/3 of what it did (with zeros
  alone it would be 8/3), beside a mean of squares of 0.07 and more in the small K3. Its float32 logits differ
  by at most 1e-4, of a largest of 23 to 38. The scaled norm weights are stored in float32; SGLang's loader
  takes them and rounds them to its parameters' type. In bfloat16 that costs as much as bfloat16 arithmetic
  does: logits differ by up to 2.2, the likeliest token at one of 233 positions.

Norms over other dimensions (heads, the query's and the experts' latents) stay as they are. As
`python -m model.padding --model DIR --output DIR --json` it needs torch and safetensors alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import padding_command
from model.kernel_sizes import LATENTS, fitting_hidden, fitting_latent

_KEPT_BESIDE: Final = frozenset({".json", ".py", ".model", ".jinja", ".txt"})
_MANIFEST: Final = "longhaul.json"  # of the unpadded checkpoint's files
_INDEX: Final = "model.safetensors.index.json"


class PaddingError(ValueError):
    """A checkpoint that can't be padded; the message names the tensor or field."""


class Use(Enum):
    """What a tensor does with a padded dimension."""

    WRITES = auto()
    READS = auto()
    NORM = auto()


@dataclass(frozen=True, slots=True)
class Growth:
    """A dimension of `old` numbers that gets `new`."""

    old: int
    new: int

    def __post_init__(self) -> None:
        assert 0 < self.old <= self.new

    @property
    def copies(self) -> int:
        """How often the old numbers stand in the new dimension."""
        return self.new // self.old

    @property
    def is_exact(self) -> bool:
        """Whether whole copies fill the new dimension, so that no norm is scaled."""
        return self.new % self.old == 0

    @property
    def share(self) -> float:
        """Mean of squares over the new dimension by that over the old one."""
        return self.copies * self.old / self.new


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of an axis that is the dimension `growth`."""

    growth: Growth
    use: Use

    def grow(self, tensor: Tensor, axis: int) -> Tensor:
        """`tensor`, whose `axis` is this stretch, with `growth.new` numbers along it."""
        growth = self.growth
        if growth.new == growth.old:
            return tensor
        if self.use is Use.NORM and not growth.is_exact:
            tensor = tensor.float() * growth.share**0.5
        copies = 1 if self.use is Use.READS else growth.copies
        shape = list(tensor.shape)
        shape[axis] = growth.new - copies * growth.old
        return torch.cat([*[tensor] * copies, tensor.new_zeros(shape)], axis)


@dataclass(frozen=True, slots=True)
class Axis:
    """Spans from the axis's begin on, then `rest` numbers that are kept."""

    spans: tuple[Span, ...]
    rest: int = 0

    @property
    def size(self) -> int:
        """Numbers along the axis before."""
        return sum(span.growth.old for span in self.spans) + self.rest

    def grow(self, tensor: Tensor, axis: int) -> Tensor:
        """`tensor` with every span of its `axis` grown."""
        *parts, rest = tensor.split([*(span.growth.old for span in self.spans), self.rest], axis)
        return torch.cat(
            [*(span.grow(part, axis) for span, part in zip(self.spans, parts, strict=True)), rest], axis
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensors are padded whose whole name matches; an axis of None has any size and keeps it."""

    name: str
    axes: tuple[Axis | None, ...]


def pad_tensors(tensors: dict[str, Tensor], rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Every tensor by the rule for its name. Raises `PaddingError` for one without, or of another shape."""
    return {name: _pad_tensor(name, tensor, rules) for name, tensor in tensors.items()}


def _pad_tensor(name: str, tensor: Tensor, rules: Sequence[Rule]) -> Tensor:
    shape = list(tensor.shape)
    rule = next((rule for rule in rules if re.fullmatch(rule.name, name)), None)
    if rule is None:
        raise PaddingError(f"tensor {name} {shape}: there is no rule how to pad it")
    expected = [None if axis is None else axis.size for axis in rule.axes]
    if len(shape) != len(expected) or any(
        size not in (None, found) for size, found in zip(expected, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise PaddingError(f"tensor {name} {shape}: its rule wants the shape [{wanted}]")
    for number, axis in enumerate(rule.axes):
        if axis is not None:
            tensor = axis.grow(tensor, number)
    return tensor.contiguous()


def k3_rules(hidden: Growth, latent: Growth, shared_key: int) -> tuple[Rule, ...]:
    """The rules of a K3's text model; `shared_key` numbers of all heads' keys stand behind the KV latent."""
    writes, reads, norm = (Axis((Span(hidden, use),)) for use in (Use.WRITES, Use.READS, Use.NORM))
    latent_reads, latent_norm = (Axis((Span(latent, use),)) for use in (Use.READS, Use.NORM))
    latent_writes = Axis((Span(latent, Use.WRITES),), rest=shared_key)
    root, layer = r"language_model\.", r"language_model\.model\.layers\.\d+\."
    attention, experts = rf"{layer}self_attn\.", rf"{layer}block_sparse_moe\."
    feed_forward = rf"(?:{layer}mlp|{experts}shared_experts)\."
    return (
        Rule(rf"{root}model\.embed_tokens\.weight", (None, writes)),
        Rule(rf"{root}lm_head\.weight", (None, reads)),
        Rule(rf"{root}model\.(norm|output_attn_res_norm)\.weight", (norm,)),
        Rule(rf"{root}model\.output_attn_res_proj\.weight", (None, reads)),
        Rule(rf"{layer}(input|post_attention)_layernorm\.weight", (norm,)),
        Rule(rf"{layer}(self_attention|mlp)_res_norm\.weight", (norm,)),
        Rule(rf"{layer}(self_attention|mlp)_res_proj\.weight", (None, reads)),
        # Either attention
        Rule(rf"{attention}g_proj\.weight", (None, reads)),
        Rule(rf"{attention}o_proj\.weight", (writes, None)),
        # KDA
        Rule(rf"{attention}([qkvb]|f_a)_proj\.weight", (None, reads)),
        Rule(rf"{attention}f_b_proj\.weight", (None, None)),
        Rule(rf"{attention}[qkv]_conv1d\.weight", (None, None, None)),
        Rule(rf"{attention}(A_log|dt_bias|o_norm\.weight)", (None,)),
        # MLA
        Rule(rf"{attention}q_a_proj\.weight", (None, reads)),
        Rule(rf"{attention}q_a_layernorm\.weight", (None,)),
        Rule(rf"{attention}q_b_proj\.weight", (None, None)),
        Rule(rf"{attention}kv_a_proj_with_mqa\.weight", (latent_writes, reads)),
        Rule(rf"{attention}kv_a_layernorm\.weight", (latent_norm,)),
        Rule(rf"{attention}kv_b_proj\.weight", (None, latent_reads)),
        # Dense layers and shared experts
        Rule(rf"{feed_forward}(gate|up)_proj\.weight", (None, reads)),
        Rule(rf"{feed_forward}down_proj\.weight", (writes, None)),
        # Routed experts, which work in a latent of their own
        Rule(rf"{experts}gate\.weight", (None, reads)),
        Rule(rf"{experts}gate\.e_score_correction_bias", (None,)),
        Rule(rf"{experts}routed_expert_down_proj\.weight", (None, reads)),
        Rule(rf"{experts}routed_expert_up_proj\.weight", (writes, None)),
        Rule(rf"{experts}routed_expert_norm\.weight", (None,)),
        Rule(rf"{experts}experts\.\d+\.w[123]\.weight", (None, None)),
    )


def pad(model: Path, output: Path, *, exact: bool = False) -> dict[str, Any]:
    """Write a padded copy of the K3 in the directory `model` to `output`, and say what was done.

    With `exact` the hidden size becomes a multiple of the old one. Nothing is written when the sizes fit:
    `padded` is false then, and `path` is `model`. Raises `PaddingError` for what can't be padded and where
    `output` holds something, OSError.
    """
    config = read_config(model)
    try:
        text: dict[str, Any] = config["text_config"]
        old, rank = int(text["hidden_size"]), int(text["kv_lora_rank"])
        shared_key = int(text["qk_rope_head_dim"])
        epsilon = float(text["rms_norm_eps"])
    except (KeyError, TypeError, ValueError) as error:
        raise PaddingError(f"{model / 'config.json'}: no configuration of a Kimi K3 ({error!r})") from error
    if (fitting := fitting_latent(rank, shared_key)) is None:
        known = ", ".join(f"up to {latent} with {key}" for key, latent in LATENTS.items())
        raise PaddingError(
            f"{model}: kv_lora_rank {rank} with qk_rope_head_dim {shared_key} can't be padded: "
            f"the kernels take {known}"
        )
    hidden, latent = Growth(old, fitting_hidden(old, exact=exact)), Growth(rank, fitting)
    summary = {
        "hidden_size": [hidden.old, hidden.new],
        "kv_lora_rank": [latent.old, latent.new],
        "exact": hidden.is_exact and latent.is_exact,
        "rms_norm_eps": epsilon,
        "eps_of_hidden": epsilon / hidden.share,
        "eps_of_latent": epsilon / latent.share,
    }
    if hidden.old == hidden.new and latent.old == latent.new:
        return {"path": str(model), "padded": False, **summary}
    text |= {"hidden_size": hidden.new, "kv_lora_rank": latent.new}
    if "text_hidden_size" in config.get("vision_config", {}):
        config["vision_config"]["text_hidden_size"] = hidden.new
    size = write(model, output, config, k3_rules(hidden, latent, shared_key))
    return {"path": str(output), "padded": True, **summary, "bytes": size}


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Content of a checkpoint's `config.json`. Raises `PaddingError`."""
    try:
        return json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PaddingError(f"{checkpoint}: no checkpoint ({error}); give a checkpoint's directory") from error


def write(source: Path, output: Path, config: dict[str, Any], rules: Sequence[Rule]) -> int:
    """Write the checkpoint `source` to `output`: tensors by `rules`, `config`, and the tokenizer's files.

    The directory appears complete or not at all: it is written beside `output` and renamed. Returns the bytes
    of all tensors. Raises `PaddingError`, OSError.
    """
    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise PaddingError(f"{source}: no *.safetensors; give a checkpoint's directory")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise PaddingError(f"{output} holds something already; give a new or an empty directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        staging.chmod(0o755)  # a temporary directory is private
        size = 0
        for file in weights:
            try:
                tensors = pad_tensors(load_file(file), rules)
            except SafetensorError as error:
                raise PaddingError(f"{file} can't be read ({error}); fetch or build it again") from error
            size += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, staging / file.name, metadata={"format": "pt"})
            (staging / file.name).chmod(0o644)
        for file in source.iterdir():
            if file.suffix in _KEPT_BESIDE and file.name not in (_MANIFEST, _INDEX, "config.json"):
                shutil.copyfile(file, staging / file.name)
        _write_json(staging / "config.json", config)
        if (source / _INDEX).is_file():
            index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
            _write_json(staging / _INDEX, {**index, "metadata": {"total_size": size}})
        if output.exists():
            output.rmdir()
        staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return size


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Pad from the command line; 0, or 1 when it can't be done."""
    parser = argparse.ArgumentParser(prog="python -m model.padding", description="Pad a K3 for GPU kernels.")
    padding_command.add_arguments(parser, "model")
    return padding_command.run("model.padding", parser.parse_args(argv), pad)


if __name__ == "__main__":
    sys.exit(main())
