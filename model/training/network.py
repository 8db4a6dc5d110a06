"""A trainable K3: the same tensors under the same names as the released checkpoint, with gradients.

Whole sequences, no cache. Everything but attention and the carrying of KDA's states works on one flat axis of
tokens, so that batches of any shape with equally many tokens run the same compiled code. Weights are float32,
products run in the dtype that `Network` is given, the residual stream and KDA's states in float32.

Sources: those of `model.training.attention`, and the configuration of the released K3 for everything else;
`model.reference` states the same network independently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.training import delta
from model.training.attention import DeltaAttention, LatentAttention
from model.training.experts import FeedForward, LatentMoe
from model.training.geometry import Geometry
from model.training.layers import Linear, RmsNorm


def mix(rows: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """AttnRes: softmax attention of one learnt query over the finished blocks and the running one.

    Args:
        rows: each [T, hidden], the embedding first, the running block last.
        query: [1, hidden].
        gain: [hidden], of the norm that a row passes before it is scored.
        eps: of that norm.
    """
    stacked = torch.stack(tuple(rows), 1)
    scores = F.rms_norm(stacked, stacked.shape[-1:], gain, eps) @ query.squeeze(0)
    return (scores.softmax(-1).unsqueeze(-1) * stacked).sum(1)


class Layer(nn.Module):
    """One K3 layer; `Network` owns the residual stream."""

    def __init__(self, geometry: Geometry, index: int) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.self_attention_res_proj, self.mlp_res_proj = Linear(hidden, 1), Linear(hidden, 1)
        self.self_attention_res_norm, self.mlp_res_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        full = index in geometry.full_attention_layers
        self.self_attn = LatentAttention(geometry) if full else DeltaAttention(geometry)
        if index < geometry.first_k_dense_replace:
            self.mlp = FeedForward(geometry, geometry.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoe(geometry)

    @property
    def feed_forward(self) -> nn.Module:
        """The dense or the sparse feed-forward, whichever this layer has."""
        return self.mlp if hasattr(self, "mlp") else self.block_sparse_moe


class Body(nn.Module):
    """What the checkpoint calls `model`: everything but the output head."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.embed_tokens = nn.Embedding(geometry.vocab_size, hidden)
        self.layers = nn.ModuleList(Layer(geometry, i) for i in range(geometry.num_hidden_layers))
        self.output_attn_res_proj = Linear(hidden, 1)
        self.output_attn_res_norm = RmsNorm(hidden, eps)
        self.norm = RmsNorm(hidden, eps)


class Network(nn.Module):
    """A whole K3 text model; parameter names are the checkpoint's without the prefix `language_model.`."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.geometry = geometry
        self.dtype = dtype
        self.mix = mix
        self.model = Body(geometry)
        self.lm_head = Linear(geometry.hidden_size, geometry.vocab_size)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers, in order."""
        return self.model.layers  # pyright: ignore[reportReturnType] -- a ModuleList

    def forward(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run whole sequences.

        Args:
            ids: [B, T] int64, T a multiple of 64.
            taps: layers after which to capture what the next layer's attention reads, before its norm: the
                features of a DSpark draft.

        Returns:
            The final hidden states after the last norm, [B * T, hidden] in the network's dtype (`lm_head`
            makes logits of them), and the captures in the order of `taps`, float32.
        """
        batch, length = ids.shape
        if length % delta.CHUNK_TOKENS:
            raise ValueError(
                f"length must be a multiple of {delta.CHUNK_TOKENS}, not {length}; pad the sequences"
            )
        position = torch.arange(length, device=ids.device).repeat(batch).unsqueeze(1)
        back = torch.arange(1, self.geometry.conv_kernel_size, device=ids.device)
        has_past = (position >= back).float()
        stream = self.model.embed_tokens(ids.flatten())
        bank: list[Tensor] = []
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = self._mix((*bank, stream), layer.self_attention_res_proj, layer.self_attention_res_norm)
            captured[index - 1] = x
            attended = layer.self_attn(layer.input_layernorm(x).to(self.dtype), batch, has_past).float()
            if index % self.geometry.attn_res_block_size == 0:
                bank.append(stream)
                stream = attended
            else:
                stream = stream + attended
            x = self._mix((*bank, stream), layer.mlp_res_proj, layer.mlp_res_norm)
            stream = stream + layer.feed_forward(layer.post_attention_layernorm(x).to(self.dtype)).float()
        out = self._mix((*bank, stream), self.model.output_attn_res_proj, self.model.output_attn_res_norm)
        captured[len(self.layers) - 1] = out
        return self.model.norm(out).to(self.dtype), [captured[tap] for tap in taps]

    def _mix(self, rows: tuple[Tensor, ...], proj: Linear, norm: RmsNorm) -> Tensor:
        return rows[0] if len(rows) == 1 else self.mix(rows, proj.weight, norm.weight, norm.eps)

    def balance(self, rate: float) -> None:
        """Balance every router (`LatentMoe.balance`)."""
        for layer in self.layers:
            if isinstance(moe := layer.feed_forward, LatentMoe):
                moe.balance(rate)

    def compile_parts(self) -> Callable[[], None]:
        """Compile what works on a flat axis of tokens, once for layers of a kind. Returns the way back."""
        parts: list[tuple[Any, str]] = [(self, "mix")]
        for layer in self.layers:
            parts += [(layer.self_attn, "before"), (layer.self_attn, "after")]
            is_sparse = isinstance(layer.feed_forward, LatentMoe)
            parts.append((layer.feed_forward, "mix" if is_sparse else "forward"))
        plain = [getattr(owner, name) for owner, name in parts]
        config = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] -- has no public name
        config.recompile_limit = max(64, config.recompile_limit)
        for (owner, name), function in zip(parts, plain, strict=True):
            setattr(owner, name, torch.compile(function, dynamic=False))

        def undo() -> None:
            for (owner, name), function in zip(parts, plain, strict=True):
                setattr(owner, name, function)

        return undo


@torch.no_grad()
def initialise(network: Network, seed: int) -> None:
    """Draw fresh weights: products keep their input's variance, those that write to the stream are small."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("A_log", "e_score_correction_bias", "res_proj.weight")):
            weight.zero_()
        elif name.endswith("dt_bias"):
            # Decays between about 0.97 and 0.9999 a token: memories of tens to thousands of tokens.
            weight.copy_(torch.empty(weight.shape).uniform_(-9.0, -3.0, generator=generator))
        else:
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("conv1d.weight"):
                drawn *= 0.3
                drawn[..., -1] += 0.7
            elif not name.endswith("embed_tokens.weight"):
                drawn *= weight.shape[-1] ** -0.5
            if (
                name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight"))
                and "routed" not in name
            ):
                drawn *= 0.5
            if name.endswith("lm_head.weight"):
                drawn *= 0.25
            weight.copy_(drawn)
