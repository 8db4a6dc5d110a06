"""A K3 checkpoint run on the CPU operators alone: what the engine's prefill could reach without the engine.

The layers call the same operators as the engine, on the same shapes, with no scheduler, no pools and no
sampling. It is checked against the reference, so that it leaves nothing out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from model.cpu import attention, convolution, kda, norm, residual

_PREFIX = "language_model.model."


@dataclass(frozen=True, slots=True)
class BareModel:
    """Weights and sizes of a K3 text model."""

    config: dict[str, Any]
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, path: Path) -> BareModel:
        """Read a checkpoint directory and lay its weights out as the engine does."""
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))["text_config"]
        weights = {
            name.removeprefix(_PREFIX): value.float()
            for file in sorted(path.glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        model = cls(config, weights)
        for layer in range(config["num_hidden_layers"]):
            model._fuse(f"layers.{layer}.")
        return model

    def _fuse(self, layer: str) -> None:
        w, attn = self.weights, f"{layer}self_attn."
        if f"{attn}A_log" in w:
            w[f"{attn}qkvg"] = torch.cat([w[f"{attn}{x}_proj.weight"] for x in "qkvg"])
            w[f"{attn}conv"] = torch.cat([w[f"{attn}{x}_conv1d.weight"] for x in "qkv"]).squeeze(1)
        else:
            w[f"{attn}down"] = torch.cat((w[f"{attn}q_a_proj.weight"], w[f"{attn}kv_a_proj_with_mqa.weight"]))
        for block in (f"{layer}mlp.", f"{layer}block_sparse_moe.shared_experts."):
            if f"{block}gate_proj.weight" in w:
                w[f"{block}gate_up"] = torch.cat((w[f"{block}gate_proj.weight"], w[f"{block}up_proj.weight"]))
        moe = f"{layer}block_sparse_moe."
        if f"{moe}gate.weight" in w:
            each = range(self.config["num_experts"])
            pairs = [torch.cat([w[f"{moe}experts.{e}.{x}.weight"] for x in ("w1", "w3")]) for e in each]
            w[f"{moe}gate_up"] = torch.stack(pairs)
            w[f"{moe}down"] = torch.stack([w[f"{moe}experts.{e}.w2.weight"] for e in each])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name], eps=self.config["rms_norm_eps"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name])

    def _kda(self, x: Tensor, name: str) -> Tensor:
        sizes = self.config["linear_attn_config"]
        heads, width = sizes["num_heads"], sizes["head_dim"]
        tokens, dim = x.shape[0], heads * width
        mixed, gate = self._linear(x, f"{name}qkvg").split((3 * dim, dim), dim=-1)
        window = x.new_zeros(1, 3 * dim, sizes["short_conv_kernel_size"] - 1)
        mixed = convolution.convolve_sequences(
            mixed, self.weights[f"{name}conv"], None, window, [tokens], [0], [False]
        )
        q, k, v = (part.view(1, tokens, heads, width) for part in mixed.split(dim, dim=-1))
        decay = self._linear(self._linear(x, f"{name}f_a_proj.weight"), f"{name}f_b_proj.weight")
        inputs = kda.activate(
            q,
            k,
            v,
            decay,
            self._linear(x, f"{name}b_proj.weight"),
            a_log=self.weights[f"{name}A_log"],
            dt_bias=self.weights[f"{name}dt_bias"],
            lower_bound=sizes["gate_lower_bound"],
        )
        out, _, _ = kda.chunked(inputs, [tokens], x.new_zeros(1, heads, width, width))
        weight = self.weights[f"{name}o_norm.weight"]
        eps = self.config["rms_norm_eps"]
        out = norm.rms_norm_gated(out, gate, weight, eps=eps, gate_activation="sigmoid")
        return self._linear(out.view(tokens, dim), f"{name}o_proj.weight")

    def _mla(self, x: Tensor, name: str) -> Tensor:
        c = self.config
        heads, nope, rope, value = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        tokens, rank = x.shape[0], c["kv_lora_rank"]
        low, latent, tail = self._linear(x, f"{name}down").split((c["q_lora_rank"], rank, rope), dim=-1)
        query = self._linear(self._norm(low, f"{name}q_a_layernorm.weight"), f"{name}q_b_proj.weight")
        query = query.view(tokens, heads, nope + rope)
        up = self.weights[f"{name}kv_b_proj.weight"].view(heads, nope + value, rank)
        key = torch.cat((self._norm(latent, f"{name}kv_a_layernorm.weight"), tail), dim=-1).unsqueeze(1)
        absorbed = torch.bmm(query[..., :nope].transpose(0, 1), up[:, :nope]).transpose(0, 1)
        out = attention.attend(
            torch.cat((absorbed, query[..., nope:]), dim=-1),
            key,
            key[..., :rank],
            scale=(nope + rope) ** -0.5,
            causal=True,
            shared=True,
        )
        out = torch.bmm(out.transpose(0, 1), up[:, nope:].transpose(1, 2)).transpose(0, 1)
        out = out.reshape(tokens, heads * value) * torch.sigmoid(self._linear(x, f"{name}g_proj.weight"))
        return self._linear(out, f"{name}o_proj.weight")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}gate_up").chunk(2, dim=-1)
        return self._linear(self._situ(gate, up), f"{name}down_proj.weight")

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear * torch.tanh(up / linear))

    def _moe(self, x: Tensor, name: str) -> Tensor:
        c = self.config
        scores = torch.sigmoid(self._linear(x, f"{name}gate.weight"))
        biased = scores + self.weights[f"{name}gate.e_score_correction_bias"]
        ids = biased.topk(c["num_experts_per_token"], dim=-1).indices
        chosen = scores.gather(1, ids)
        chosen = chosen / chosen.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        latent = self._linear(x, f"{name}routed_expert_down_proj.weight")
        routed = torch.zeros_like(latent)
        for expert in range(c["num_experts"]):
            token, place = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(latent[token], self.weights[f"{name}gate_up"][expert]).chunk(2, dim=-1)
            out = F.linear(self._situ(gate, up), self.weights[f"{name}down"][expert])
            routed.index_add_(0, token, out * chosen[token, place].unsqueeze(-1))
        routed = self._norm(routed, f"{name}routed_expert_norm.weight")
        routed = self._linear(routed, f"{name}routed_expert_up_proj.weight")
        return routed + self._mlp(x, f"{name}shared_experts.")

    def _mix(self, prefix: Tensor, bank: Tensor, name: str) -> Tensor:
        if bank.shape[1] == 0:
            return prefix
        score = self.weights[f"{name}_norm.weight"] * self.weights[f"{name}_proj.weight"].view(-1)
        return residual.mix_residuals(prefix, bank, score, eps=self.config["rms_norm_eps"])

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        """Run a prompt [T] through all layers: the logits of its last token [vocabulary]."""
        block = self.config["attn_res_block_size"]
        prefix = self.weights["embed_tokens.weight"][ids]
        bank = prefix.new_empty(prefix.shape[0], 0, prefix.shape[1])
        for index in range(self.config["num_hidden_layers"]):
            layer = f"layers.{index}."
            x = self._mix(prefix, bank, f"{layer}self_attention_res")
            attn = f"{layer}self_attn."
            attend = self._kda if f"{attn}A_log" in self.weights else self._mla
            out = attend(self._norm(x, f"{layer}input_layernorm.weight"), attn)
            if index % block == 0:
                bank = torch.cat((bank, prefix.unsqueeze(1)), dim=1)
                prefix = out
            else:
                prefix = prefix + out
            x = self._mix(prefix, bank, f"{layer}mlp_res")
            x = self._norm(x, f"{layer}post_attention_layernorm.weight")
            if index < self.config["first_k_dense_replace"]:
                prefix = prefix + self._mlp(x, f"{layer}mlp.")
            else:
                prefix = prefix + self._moe(x, f"{layer}block_sparse_moe.")
        last = self._mix(prefix[-1:], bank[-1:], "output_attn_res")
        head = self.weights["language_model.lm_head.weight"]
        return F.linear(self._norm(last, "norm.weight"), head)[0]
