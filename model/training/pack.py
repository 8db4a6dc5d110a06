"""Turns what a training run left into the shipped checkpoint with its card."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.training import checkpoint, curve
from model.training.geometry import small_config
from model.training.weights import read

CARD = "README.md"
_CARD = Path(__file__).with_name("card.md")


def pack(source: Path, target: Path, seed: int = 0, sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write the checkpoint whose weights and log lie in `source` to `target`. The vocabulary there is kept.

    `sizes` are those that the run's `Plan` had.

    Raises FileNotFoundError when `source` lacks weights or log, or `target` a vocabulary.
    """
    tensors = read(source)
    config = small_config(**(sizes or {}))
    log = curve.read_log(source / "log.jsonl")
    vocabulary = (target / "tokenizer.json").read_text(encoding="utf-8")
    for old in target.glob("*.safetensors"):
        old.unlink()
    checkpoint.write(target, config, tensors, vocabulary)
    (target / "loss.svg").write_text(curve.draw(log), encoding="utf-8")
    shutil.copyfile(source / "log.jsonl", target / "training.jsonl")
    summary = {"seed": seed, "parameters": checkpoint.parameters(tensors)}
    (target / CARD).write_text(_card(config, tensors_bytes(tensors), log, summary), encoding="utf-8")
    files = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(target.iterdir())
        if file.is_file() and file.name not in ("longhaul.json", CARD)
    }
    manifest = {**summary, "files": files}
    (target / "longhaul.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return summary


def tensors_bytes(tensors: dict[str, Any]) -> int:
    """Bytes that the tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _card(config: dict[str, Any], size: int, log: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    text = config["text_config"]
    steps = [line for line in log if "kinds" in line]
    last = [line for line in log if "held_out" in line][-1]  # after the last step, which logs no line itself
    batch = steps[-1]["tokens"] // steps[-1]["step"]
    tokens = steps[-1]["tokens"] + (last["step"] - steps[-1]["step"]) * batch
    passes = [line for line in log if "plain_pass_ms" in line]
    rates = sorted(line["tokens_per_second"] for line in steps)
    use = sorted(line["mfu"] for line in steps)
    rows = {
        "steps": f"{last['step']:,}",
        "tokens": f"{tokens:,}",
        "time on one H200": f"{last['seconds'] / 60:.1f} minutes",
        "tokens a second (median)": f"{rates[len(rates) // 2]:,}",
        "model FLOP utilisation (median, of 989 TFLOP/s)": f"{use[len(use) // 2]:.1%}",
    }
    if passes:
        rows["forward and backward pass, plain and compiled"] = (
            f"{passes[-1]['plain_pass_ms']:.0f} ms, {passes[-1]['compiled_pass_ms']:.0f} ms"
        )
    return _CARD.read_text(encoding="utf-8").format(
        parameters=summary["parameters"],
        hidden=text["hidden_size"],
        experts=text["num_experts"],
        chosen=text["num_experts_per_token"],
        vocabulary=text["vocab_size"],
        megabytes=size / 1e6,
        seed=summary["seed"],
        batch=batch,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        held_out="\n".join(
            f"| {length} | {r['loss']} | {r['messages']} | {r['call_messages']} | {r['answers']} |"
            for length, r in last["held_out"].items()
        ),
    )
