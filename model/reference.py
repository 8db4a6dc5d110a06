"""Kimi K3's text model in plain PyTorch, written from the equations: what the engine is checked against.

No paging, no kernels, no chunked recurrences, none of the engine's code: a token goes through the layers as
the papers have it. It is exact in the sense of float32 (or float64) arithmetic and fast enough for a tiny
model. `logits` takes a whole sequence and keeps nothing; `greedy` keeps the plain mathematical state of each
layer (KDA's memory, the last inputs of its convolutions, keys and values) between the tokens it generates.

Sources:

- Kimi Delta Attention and the hybrid of KDA with NoPE attention: Kimi Linear, arXiv 2510.26692.
- Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1. Output gate: arXiv 2505.06708.
- Sigmoid routing with a bias that only selects: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
- Block attention residuals, Stable LatentMoE, SiTU and the lower bound of the decay: the Kimi K3 technical
  report; names and shapes of tensors are those of its checkpoint.

As `python -m model.reference --model DIR --ids 1,2,3 --tokens 16 --json` it serves a process without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

_L2_EPSILON = 1e-6
_QUERY_BLOCK = 512  # rows of the attention matrix held at a time


class ReferenceError(ValueError):
    """Ids or a checkpoint that the model cannot take; the message says why and what to give instead."""


class Step(NamedTuple):
    """One greedy step: the token, its log probability, and how far its logit lies above the next one's."""

    token: int
    logprob: float
    gap: float


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers of K3's text model, under the names of its `config.json`. Layers count from 0."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_layers: frozenset[int]
    kda_heads: int
    kda_head_dim: int
    conv_size: int
    gate_lower_bound: float
    attn_res_block_size: int
    rms_norm_eps: float
    situ_beta: float
    situ_linear_beta: float
    num_experts: int
    num_experts_per_token: int
    routed_scaling_factor: float
    first_k_dense_replace: int

    def __post_init__(self) -> None:
        assert all(0 <= layer < self.num_hidden_layers for layer in self.kda_layers)
        assert self.gate_lower_bound < 0, "the log decay lies between the bound and 0"

    @classmethod
    def read(cls, path: Path) -> Config:
        """Read the text model's configuration of a checkpoint directory. Raises `ReferenceError`."""
        try:
            text: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))[
                "text_config"
            ]
            linear: dict[str, Any] = text["linear_attn_config"]
            direct = {name: text[name] for name in cls.__dataclass_fields__ if name in text}
            config = cls(
                **direct,
                kda_layers=frozenset(layer - 1 for layer in linear["kda_layers"]),
                kda_heads=linear["num_heads"],
                kda_head_dim=linear["head_dim"],
                conv_size=linear["short_conv_kernel_size"],
                gate_lower_bound=linear["gate_lower_bound"],
                situ_beta=text["activation_situ_beta"],
                situ_linear_beta=text["activation_situ_linear_beta"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceError(f"{path}: no configuration of a Kimi K3 ({error!r})") from error
        features = {
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "latent_moe_use_norm": True,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "hidden_act": "situ",
            "num_expert_group": 1,
            "moe_layer_freq": 1,
            "tie_word_embeddings": False,
        }
        if other := [name for name, value in features.items() if text.get(name) != value]:
            raise ReferenceError(f"{path}: the reference does not cover this {', '.join(other)}")
        if not linear.get("use_full_rank_gate"):
            raise ReferenceError(f"{path}: the reference does not cover a low-rank use_full_rank_gate")
        return config


@dataclass(slots=True)
class _KdaState:
    """What a KDA layer remembers: memory `[head, key, value]` and the last inputs of each convolution."""

    memory: Tensor
    inputs: dict[str, Tensor]


@dataclass(slots=True)
class _MlaState:
    """Keys `[token, head, nope + rope]` and values `[token, head, value]` of the tokens so far."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class _Sequence:
    """State of every layer after the tokens so far."""

    kda: dict[int, _KdaState] = field(default_factory=dict[int, _KdaState])
    mla: dict[int, _MlaState] = field(default_factory=dict[int, _MlaState])


class ReferenceModel:
    """Kimi K3's text model over a mapping of weights."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._weights = weights

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        """Read an unquantised checkpoint directory; all arithmetic is done in `dtype`.

        Raises `ReferenceError`.
        """
        config = Config.read(path)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ReferenceError(f"{path}: no *.safetensors; give a checkpoint directory")
        weights: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in load_file(file).items():
                weights[name.removeprefix("language_model.")] = tensor.to(dtype)
        return cls(config, weights)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits `[T, vocab]` after each of T tokens, from the whole sequence at once."""
        return self._logits(self._run(self._embed(ids), _Sequence())[-1])

    @torch.inference_mode()
    def hidden_taps(self, ids: Sequence[int], layers: Sequence[int]) -> Tensor:
        """What a DSpark draft sees `[T, len(layers), hidden]`: the stream after each of the layers named.

        With attention residuals that is the mixture which the next layer's attention would read, before its
        norm; after the last layer, the one that the output reads (SGLang, `_dspark_capture_stream`).
        """
        if outside := [layer for layer in layers if not 0 <= layer < self.config.num_hidden_layers]:
            raise ReferenceError(f"layers {outside} do not exist; there are {self.config.num_hidden_layers}")
        mixtures = self._run(self._embed(ids), _Sequence())
        return torch.stack([mixtures[layer + 1] for layer in layers], dim=1)

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], count: int, stop: Collection[int] = ()) -> list[Step]:
        """Continue by the likeliest token, `count` times or up to and with a token of `stop`.

        Of equal logits the lowest id wins.
        """
        sequence = _Sequence()
        new = self._embed(ids)
        steps: list[Step] = []
        while len(steps) < count:
            logits = self._logits(self._run(new, sequence)[-1][-1])
            best, second = logits.topk(2).values.tolist()
            token = int(logits.argmax())
            steps.append(Step(token, float(logits.log_softmax(-1)[token]), best - second))
            if token in stop:
                break
            new = self._embed([token])
        return steps

    def _embed(self, ids: Sequence[int]) -> Tensor:
        if not ids:
            raise ReferenceError("no ids: give at least one")
        if outside := [token for token in ids if not 0 <= token < self.config.vocab_size]:
            raise ReferenceError(f"ids {outside[:5]} are outside the vocabulary of {self.config.vocab_size}")
        return self._weights["model.embed_tokens.weight"][torch.tensor(ids)]

    def _logits(self, mixture: Tensor) -> Tensor:
        return self._linear("lm_head", self._norm("model.norm", mixture))

    def _run(self, embeddings: Tensor, sequence: _Sequence) -> list[Tensor]:
        """Take new tokens through the layers, continuing `sequence`.

        Returns the mixture `[T, hidden]` that each layer's attention reads and, last, the one of the output.

        Block attention residuals: where a plain residual stream adds up, a reader here mixes the sums of the
        finished blocks and of the current one, weighted by softmax over `w . RMSNorm(sum)` with a query `w`
        of its own. The embedding is the first block; every `attn_res_block_size` layers a block ends.
        """
        blocks: list[Tensor] = []
        current: Tensor | None = embeddings
        mixtures: list[Tensor] = []
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}"
            mixture = self._mix(f"{at}.self_attention_res", blocks, current)
            mixtures.append(mixture)
            if layer % self.config.attn_res_block_size == 0:
                assert current is not None
                blocks.append(current)
                current = None
            attend = self._kda if layer in self.config.kda_layers else self._mla
            attended = attend(layer, self._norm(f"{at}.input_layernorm", mixture), sequence)
            current = attended if current is None else current + attended
            mixture = self._mix(f"{at}.mlp_res", blocks, current)
            inner = self._norm(f"{at}.post_attention_layernorm", mixture)
            if layer < self.config.first_k_dense_replace:
                current = current + self._ffn(f"{at}.mlp", inner)
            else:
                current = current + self._moe(f"{at}.block_sparse_moe", inner)
        return [*mixtures, self._mix("model.output_attn_res", blocks, current)]

    def _mix(self, reader: str, blocks: Sequence[Tensor], current: Tensor | None) -> Tensor:
        rows = torch.stack([*blocks, *([] if current is None else [current])], dim=-2)
        scores = self._linear(f"{reader}_proj", self._norm(f"{reader}_norm", rows))
        return (scores.softmax(dim=-2) * rows).sum(dim=-2)

    def _kda(self, layer: int, x: Tensor, sequence: _Sequence) -> Tensor:
        """Kimi Delta Attention: `S = (I - b k k^T) Diag(a) S + b k v^T`, read as `o = S^T q`."""
        at, config = f"model.layers.{layer}.self_attn", self.config
        heads, size = config.kda_heads, config.kda_head_dim
        state = sequence.kda.get(layer)
        if state is None:
            past = x.new_zeros(config.conv_size - 1, heads * size)
            state = _KdaState(x.new_zeros(heads, size, size), {"q": past, "k": past, "v": past})
            sequence.kda[layer] = state

        def convolved(name: str) -> Tensor:
            inputs = torch.cat([state.inputs[name], self._linear(f"{at}.{name}_proj", x)])
            state.inputs[name] = inputs[len(x) :]
            taps = self._weights[f"{at}.{name}_conv1d.weight"][:, 0]  # [channel, tap], the last tap is now
            windows = inputs.unfold(0, config.conv_size, 1)  # [token, channel, tap]
            return functional.silu((windows * taps).sum(-1)).unflatten(-1, (heads, size))

        query = _unit(convolved("q")) * size**-0.5
        key = _unit(convolved("k"))
        value = convolved("v")
        rate = self._weights[f"{at}.A_log"].reshape(heads, 1).exp()
        forget = self._linear(f"{at}.f_b_proj", self._linear(f"{at}.f_a_proj", x))
        forget = (forget + self._weights[f"{at}.dt_bias"]).unflatten(-1, (heads, size))
        decay = (config.gate_lower_bound * torch.sigmoid(rate * forget)).exp()  # [token, head, key]
        beta = torch.sigmoid(self._linear(f"{at}.b_proj", x))  # [token, head]

        memory = state.memory
        reads: list[Tensor] = []
        for q, k, v, a, b in zip(query, key, value, decay, beta, strict=True):
            memory = memory * a.unsqueeze(-1)
            seen = (k.unsqueeze(1) @ memory).squeeze(1)  # what the memory holds under this key
            memory = memory + k.unsqueeze(-1) * (b.unsqueeze(-1) * (v - seen)).unsqueeze(1)
            reads.append((q.unsqueeze(1) @ memory).squeeze(1))
        state.memory = memory
        gate = self._linear(f"{at}.g_proj", x).unflatten(-1, (heads, size))
        read = self._norm(f"{at}.o_norm", torch.stack(reads)) * torch.sigmoid(gate)
        return self._linear(f"{at}.o_proj", read.flatten(-2))

    def _mla(self, layer: int, x: Tensor, sequence: _Sequence) -> Tensor:
        """Multi-head latent attention without rotation (NoPE), its output gated by `sigmoid(W x)`."""
        at, config = f"model.layers.{layer}.self_attn", self.config
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        latent = self._norm(f"{at}.q_a_layernorm", self._linear(f"{at}.q_a_proj", x))
        query = self._linear(f"{at}.q_b_proj", latent).unflatten(-1, (heads, nope + rope))
        latent, shared_key = self._linear(f"{at}.kv_a_proj_with_mqa", x).split(
            [config.kv_lora_rank, rope], -1
        )
        expanded = self._linear(f"{at}.kv_b_proj", self._norm(f"{at}.kv_a_layernorm", latent))
        own_key, value = expanded.unflatten(-1, (heads, -1)).split([nope, config.v_head_dim], -1)
        key = torch.cat([own_key, shared_key.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        if (past := sequence.mla.get(layer)) is not None:
            key, value = torch.cat([past.keys, key]), torch.cat([past.values, value])
        sequence.mla[layer] = _MlaState(key, value)

        before = len(key) - len(x)
        position = torch.arange(len(key))
        reads: list[Tensor] = []
        for start in range(0, len(x), _QUERY_BLOCK):
            block = query[start : start + _QUERY_BLOCK]
            scores = torch.einsum("qhd,khd->hqk", block, key) * (nope + rope) ** -0.5
            now = before + start + torch.arange(len(block))
            scores = scores.masked_fill(position > now.unsqueeze(-1), float("-inf"))
            reads.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
        gate = torch.sigmoid(self._linear(f"{at}.g_proj", x))
        return self._linear(f"{at}.o_proj", torch.cat(reads).flatten(-2) * gate)

    def _moe(self, at: str, x: Tensor) -> Tensor:
        """Stable LatentMoE: experts work in a narrower space, normalised before it is widened again."""
        config = self.config
        score = torch.sigmoid(self._linear(f"{at}.gate", x))
        bias = self._weights[f"{at}.gate.e_score_correction_bias"]
        chosen = (score + bias).topk(config.num_experts_per_token, dim=-1).indices
        weight = score.gather(-1, chosen)
        weight = weight / weight.sum(-1, keepdim=True) * config.routed_scaling_factor
        narrow = self._linear(f"{at}.routed_expert_down_proj", x)
        routed = torch.zeros_like(narrow)
        for expert in range(config.num_experts):
            tokens, slots = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                w1, w3, w2 = (f"{at}.experts.{expert}.{name}" for name in ("w1", "w3", "w2"))
                own = narrow[tokens]
                inner = self._situ(self._linear(w1, own), self._linear(w3, own))
                routed[tokens] += self._linear(w2, inner) * weight[tokens, slots].unsqueeze(-1)
        widened = self._linear(f"{at}.routed_expert_up_proj", self._norm(f"{at}.routed_expert_norm", routed))
        return widened + self._ffn(f"{at}.shared_experts", x)

    def _ffn(self, at: str, x: Tensor) -> Tensor:
        inner = self._situ(self._linear(f"{at}.gate_proj", x), self._linear(f"{at}.up_proj", x))
        return self._linear(f"{at}.down_proj", inner)

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiTU: a SiLU whose linear factors saturate, `b tanh(g/b) sigmoid(g) * c tanh(u/c)`."""
        beta, linear_beta = self.config.situ_beta, self.config.situ_linear_beta
        gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        return gate * (linear_beta * torch.tanh(up / linear_beta))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self._weights[f"{name}.weight"]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPSILON)


def main(argv: Sequence[str] | None = None) -> int:
    """Greedy continuation from the command line; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.reference", description="Continue ids greedily with the reference model."
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--ids", required=True, help="ids with commas, or - for a JSON array on stdin")
    parser.add_argument("--tokens", type=int, default=16, help="how many to generate (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    try:
        ids = _parse_ids(sys.stdin.read() if args.ids == "-" else f"[{args.ids}]")
        steps = ReferenceModel.load(args.model).greedy(ids, args.tokens)
    except ReferenceError as error:
        print(f"model.reference: {error}", file=sys.stderr)
        return 2
    tokens, logprobs, gaps = map(list, zip(*steps, strict=True)) if steps else ([], [], [])
    if args.json:
        print(json.dumps({"tokens": tokens, "logprobs": logprobs, "gaps": gaps}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("token", "logprob", "gap")
    for step in steps:
        table.add_row(str(step.token), f"{step.logprob:.6f}", f"{step.gap:.6f}")
    Console().print(table)
    return 0


def _parse_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(type(id) is int for id in cast("list[Any]", ids)):
        raise ReferenceError(
            "--ids must be whole numbers with commas between, or - and a JSON array on stdin"
        )
    return cast("list[int]", ids)


if __name__ == "__main__":
    sys.exit(main())
