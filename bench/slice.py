"""A slice of Kimi K3: the released model's width, few layers and experts, no weights.

One GPU holds it, and every kernel of a layer sees the sizes that it sees in the released model: to time the
cache, restores and rounds of speculation. It has no weights and no tokenizer: the profile `h200-slice` makes
up the former, and requests bring ids. Beside it stands the configuration of a DSpark draft of its width.

The sizes are those of the released `config.json` (`model.capacity.geometry`); the draft's are of no released
one: five layers, which read five of the target's.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from model.capacity.geometry import Geometry
from speculative.draft import DraftConfig

DEFAULT_LAYERS: Final = 8
DEFAULT_EXPERTS: Final = 64
CHOSEN_EXPERTS: Final = 16
_PERIOD: Final = 4  # of the layers, every fourth has latent attention
_RESIDUAL_BLOCK: Final = 4
_DRAFT_LAYERS: Final = 5


class SliceError(ValueError):
    """A slice that can't be: the message names the option."""


def build(output: Path, *, layers: int = DEFAULT_LAYERS, experts: int = DEFAULT_EXPERTS) -> tuple[Path, Path]:
    """Write the configurations of the slice, to `output`, and of its draft, to `output` with `-draft`.

    Raises SliceError, OSError.
    """
    if layers < 2 * _PERIOD or layers % _PERIOD:
        raise SliceError(f"--layers {layers}: give a multiple of {_PERIOD} from {2 * _PERIOD} on")
    if experts < CHOSEN_EXPERTS:
        raise SliceError(f"--experts {experts}: a token goes to {CHOSEN_EXPERTS}; give that many at least")
    draft = output.with_name(f"{output.name}-draft")
    _write(output, _target(Geometry(), layers, experts))
    last = layers - 2
    config = DraftConfig.of(
        output,
        # Evenly from the second layer to the last but one.
        target_layers=tuple(1 + (n * (last - 1) + 2) // (_DRAFT_LAYERS - 1) for n in range(_DRAFT_LAYERS)),
        layers=_DRAFT_LAYERS,
        heads=64,
        kv_heads=16,
        head_dim=64,
        intermediate_size=2 * Geometry().hidden,
        dtype="bfloat16",
    )
    _write(draft, config.to_json())
    return output, draft


def _write(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _target(k3: Geometry, layers: int, experts: int) -> dict[str, Any]:
    full = list(range(_PERIOD, layers + 1, _PERIOD))
    text = {
        "architectures": ["KimiK3LinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": k3.vocabulary,
        "max_position_embeddings": k3.context_tokens,
        "hidden_size": k3.hidden,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_hidden_layers": layers,
        "attn_res_block_size": _RESIDUAL_BLOCK,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
            "full_attn_layers": full,
            "num_heads": k3.kda_heads,
            "head_dim": k3.kda_head_dim,
            "short_conv_kernel_size": k3.conv_kernel,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "num_attention_heads": k3.mla_heads,
        "num_key_value_heads": k3.mla_heads,
        "head_dim": k3.kda_head_dim,
        "q_lora_rank": k3.q_lora_rank,
        "kv_lora_rank": k3.kv_lora_rank,
        "qk_nope_head_dim": k3.nope_dim,
        "qk_rope_head_dim": k3.rope_dim,
        "v_head_dim": k3.value_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rope_theta": 10000.0,
        "intermediate_size": k3.dense_hidden,
        "first_k_dense_replace": k3.dense_layers,
        "moe_layer_freq": 1,
        "num_experts": experts,
        "num_experts_per_token": CHOSEN_EXPERTS,
        "num_shared_experts": k3.shared_experts,
        "moe_intermediate_size": k3.expert_hidden,
        "routed_expert_hidden_size": k3.routed_hidden,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }
    # SGLang wants a vision tower of a K3: the least that it builds, since nothing is sent there.
    vision = {
        "model_type": "kimi_k3_vision",
        "patch_size": 14,
        **{f"init_pos_emb_{axis}": size for axis, size in (("height", 4), ("width", 4), ("time", 1))},
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        **dict.fromkeys(("vt_hidden_size", "vt_intermediate_size", "qkv_hidden_size", "mm_hidden_size"), 64),
        "text_hidden_size": k3.hidden,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **special,
        "media_placeholder_token_id": 3,
        "text_config": text | special,
        "vision_config": vision,
    }


def main() -> int:
    """Write; 0, 1 when it can't be written, 2 for a slice that can't be."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.slice", description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="DIR and DIR-draft are written"
    )
    parser.add_argument(
        "--layers", type=int, default=DEFAULT_LAYERS, help="three KDA, one MLA, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--experts", type=int, default=DEFAULT_EXPERTS, help="of each layer (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of two lines")
    args = parser.parse_args()
    try:
        target, draft = build(args.output, layers=args.layers, experts=args.experts)
    except SliceError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"bench.slice: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"target": str(target), "draft": str(draft)}) if args.json else f"{target}\n{draft}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
