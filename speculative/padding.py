"""Pad a DSpark draft for a K3 that `model.padding` padded: the same proposals from the padded states.

The draft's hidden size is its target's, whose embedding and output head it uses, so that it is padded by the
same rules: whole copies, then zeros. Of each captured state it reads the first copy alone. The draft has an
epsilon of its own, which counts more by the same share. As
`python -m speculative.padding --draft DIR --output DIR --json` it needs torch and safetensors alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model import padding_command
from model.kernel_sizes import fitting_hidden
from model.padding import Axis, Growth, PaddingError, Rule, Span, Use, read_config, write


def draft_rules(hidden: Growth, taps: int, markov_rank: int) -> tuple[Rule, ...]:
    """The rules of a draft that reads `taps` states of its target (names: `speculative.draft`)."""
    writes, reads, norm = (Axis((Span(hidden, use),)) for use in (Use.WRITES, Use.READS, Use.NORM))
    layer = r"layers\.\d+\."
    return (
        Rule(r"fc\.weight", (writes, Axis((Span(hidden, Use.READS),) * taps))),
        Rule(r"(hidden_norm|norm)\.weight", (norm,)),
        Rule(rf"{layer}(input|post_attention)_layernorm\.weight", (norm,)),
        Rule(rf"{layer}self_attn\.[qkv]_proj\.weight", (None, reads)),
        Rule(rf"{layer}self_attn\.o_proj\.weight", (writes, None)),
        Rule(rf"{layer}self_attn\.[qk]_norm\.weight", (None,)),
        Rule(rf"{layer}mlp\.(gate|up)_proj\.weight", (None, reads)),
        Rule(rf"{layer}mlp\.down_proj\.weight", (writes, None)),
        Rule(r"markov_head\.markov_w[12]\.weight", (None, None)),
        Rule(r"confidence_head\.proj\.weight", (None, Axis((Span(hidden, Use.READS),), rest=markov_rank))),
        Rule(r"confidence_head\.proj\.bias", (None,)),
    )


def pad(draft: Path, output: Path, *, exact: bool = False) -> dict[str, Any]:
    """Write a padded copy of the draft in the directory `draft` to `output`, and say what was done.

    `exact` must be as for the target. Nothing is written when the size fits: `padded` is false then, and
    `path` is `draft`. Raises `PaddingError` for what can't be padded and where `output` holds something,
    OSError.
    """
    config = read_config(draft)
    try:
        old, markov_rank = int(config["hidden_size"]), int(config["markov_rank"])
        taps = len(config["dflash_config"]["target_layer_ids"])
        with_markov = bool(config["confidence_head_with_markov"])
        epsilon = float(config["rms_norm_eps"])
    except (KeyError, TypeError, ValueError) as error:
        raise PaddingError(f"{draft / 'config.json'}: no DSpark draft ({error!r})") from error
    hidden = Growth(old, fitting_hidden(old, exact=exact))
    summary = {
        "hidden_size": [hidden.old, hidden.new],
        "exact": hidden.is_exact,
        "rms_norm_eps": epsilon,
        "eps_of_hidden": epsilon / hidden.share,
    }
    if hidden.old == hidden.new:
        return {"path": str(draft), "padded": False, **summary}
    config["hidden_size"] = hidden.new
    rules = draft_rules(hidden, taps, markov_rank if with_markov else 0)
    size = write(draft, output, config, rules)
    return {"path": str(output), "padded": True, **summary, "bytes": size}


def main(argv: Sequence[str] | None = None) -> int:
    """Pad from the command line; 0, or 1 when it can't be done."""
    parser = argparse.ArgumentParser(
        prog="python -m speculative.padding", description="Pad a DSpark draft for GPU kernels."
    )
    padding_command.add_arguments(parser, "draft")
    return padding_command.run("speculative.padding", parser.parse_args(argv), pad)


if __name__ == "__main__":
    sys.exit(main())
