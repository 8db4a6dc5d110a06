"""A tiny Kimi K3 with random weights: every mechanism of the released model, small enough for a CPU.

Eight layers in K3's pattern (three KDA, then one gated MLA, twice), AttnRes, Stable LatentMoE, SiTU, NoPE, a
context of 32,768 tokens, float32. It speaks no language. It is made to be checked against: the same seed
gives the same bytes on every machine, and its states matter, so that a wrong one changes what it says
(`model.tiny_weights`).

Files: `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json`,
`tokenizer_config.json`, the Python files of the tokenizer, and, written last, `longhaul.json`: the seed and
every file's SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file

from model.state import state_directory
from model.tiny_weights import weights
from model.vocabulary import (
    SPECIAL_IDS,
    TEXT_TOKENS,
    TOKENIZER_SOURCES,
    VOCAB_SIZE,
    tokenizer_config,
    tokenizer_json,
)

CONTEXT_TOKENS: Final = 32768
MANIFEST: Final = "longhaul.json"

_HIDDEN: Final = 256
_LAYERS: Final = 8
_HEADS: Final = 4
_HEAD_DIM: Final = 32
_ROPE_DIM: Final = 16
_Q_RANK: Final = 96
_KV_RANK: Final = 64
_DENSE_FFN: Final = 512
_EXPERTS: Final = 8
_EXPERT_FFN: Final = 64
_SHARED_EXPERTS: Final = 2
_LATENT: Final = 128
_CONV: Final = 4
_FULL_ATTENTION_LAYERS: Final = (4, 8)  # from 1, as K3's configuration counts

TOKEN_ROLES: Final = {"bos": "[BOS]", "eos": "<|end_of_msg|>", "pad": "[PAD]"}


class CheckpointError(Exception):
    """A directory that cannot take the checkpoint, or that holds a damaged one, and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A tiny checkpoint on disk. `files` maps each name to its SHA-256 in hex."""

    path: Path
    seed: int
    parameters: int
    files: dict[str, str]

    def check_integrity(self) -> None:
        """Compare every file with its digest. Raises `CheckpointError` for the first that differs."""
        for name, digest in self.files.items():
            if not (file := self.path / name).is_file() or _sha256(file) != digest:
                raise CheckpointError(f"{file} is missing or damaged; delete {self.path} and build it again")


def default_path() -> Path:
    """Where the checkpoint lives unless told otherwise: `models/k3-tiny` in the state directory."""
    return state_directory() / "models" / "k3-tiny"


def read(path: Path) -> Checkpoint | None:
    """Return the complete tiny checkpoint at `path`, or None where there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        return Checkpoint(path, int(manifest["seed"]), int(manifest["parameters"]), dict(manifest["files"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be read: {error}; delete {path} and retry"
        ) from error


def build(path: Path, seed: int = 0) -> Checkpoint:
    """Write the checkpoint of `seed` to `path`; where it stands already, leave it as it is.

    The directory appears complete or not at all: it is built beside `path` and renamed. A tiny checkpoint of
    another seed or version is replaced; anything else in the way raises `CheckpointError`.
    """
    if read(path) is None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} holds something else; give a new or an empty directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        built = _write(staging, seed)
        if (present := read(path)) is not None:
            if present.files == built.files:
                present.check_integrity()
                return present
            shutil.rmtree(path)
        staging.rename(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Checkpoint(path, built.seed, built.parameters, built.files)


def _write(path: Path, seed: int) -> Checkpoint:
    path.chmod(0o755)  # a temporary directory is private
    text: dict[str, Any] = config()["text_config"]
    tensors = {weight.name: weight.draw(seed) for weight in weights(text, TEXT_TOKENS)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_SOURCES:
        shutil.copyfile(Path(__file__).with_name(name), path / name)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    _write_json(path / "tokenizer_config.json", tokenizer_config())
    _write_json(path / "config.json", config())
    tokens = {f"{name}_token_id": SPECIAL_IDS[text] for name, text in TOKEN_ROLES.items()}
    _write_json(path / "generation_config.json", tokens)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    files = {file.name: _sha256(file) for file in sorted(path.iterdir())}
    _write_json(path / MANIFEST, {"seed": seed, "parameters": parameters, "files": files})
    return Checkpoint(path, seed, parameters, files)


def config() -> dict[str, Any]:
    """Content of `config.json`.

    `vocab_size` stands in `text_config` alone: SGLang's `KimiK3Config` derives the outer one and cannot set
    it. The vision tower exists in name only, as no image is ever encoded.
    """
    tokens = {f"{name}_token_id": SPECIAL_IDS[text] for name, text in TOKEN_ROLES.items()}
    text = {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _DENSE_FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": _Q_RANK,
        "kv_lora_rank": _KV_RANK,
        "qk_nope_head_dim": _HEAD_DIM,
        "qk_rope_head_dim": _ROPE_DIM,
        "v_head_dim": _HEAD_DIM,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, _LAYERS + 1) if layer not in _FULL_ATTENTION_LAYERS],
            "full_attn_layers": list(_FULL_ATTENTION_LAYERS),
            "num_heads": _HEADS,
            "head_dim": _HEAD_DIM,
            "short_conv_kernel_size": _CONV,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 4,
        "rms_norm_eps": 1e-05,
        "num_experts": _EXPERTS,
        "num_experts_per_token": 2,
        "num_shared_experts": _SHARED_EXPERTS,
        "moe_intermediate_size": _EXPERT_FFN,
        "routed_expert_hidden_size": _LATENT,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **tokens,
    }
    vision = {
        "model_type": "kimi_k3_vision",
        "patch_size": 14,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "init_pos_emb_time": 1,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
        "vt_hidden_size": 64,
        "vt_intermediate_size": 64,
        "qkv_hidden_size": 64,
        "mm_hidden_size": 64,
        "text_hidden_size": _HIDDEN,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "media_placeholder_token_id": SPECIAL_IDS["<|media_pad|>"],
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
        **tokens,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
