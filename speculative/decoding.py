"""A trainer's K3 as a recurrent decoder of many sequences at once, to let a target write its own text.

Each step feeds every sequence its next token. Tokens that a sequence was given are followed; behind the last
of them the next token is drawn. A sequence that drew an end of message waits for what follows it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.training import delta
from model.training.attention import DeltaAttention, LatentAttention, ShortConv
from model.training.layers import Linear
from model.training.network import Layer, Network

_PREFILL_TOKENS: Final = 65536


def narrow(target: Network) -> None:
    """Keep the matrices of a network that is not trained in the dtype that its products run in."""
    for name, module in target.named_modules():
        if isinstance(module, Linear) and not name.endswith("res_proj"):
            module.weight.data = module.weight.data.to(target.dtype)


def through(
    target: Network,
    tokens: Tensor,
    attend: Callable[[int, Layer, Tensor], Tensor],
    captured: dict[int, Tensor] | None = None,
) -> Tensor:
    """Final hidden states of tokens [T], as `Network.forward`, with attention of one's own.

    `captured` is filled with what each layer's attention reads, by the layer before it.
    """
    stream = target.model.embed_tokens(tokens)
    bank: list[Tensor] = []

    def mixed(proj: Linear, norm: torch.nn.Module) -> Tensor:
        if not bank:
            return stream
        return target.mix((*bank, stream), proj.weight, norm.weight, norm.eps)  # pyright: ignore[reportArgumentType] -- an RmsNorm

    for index, layer in enumerate(target.layers):
        x = mixed(layer.self_attention_res_proj, layer.self_attention_res_norm)
        if captured is not None:
            captured[index - 1] = x
        attended = attend(index, layer, layer.input_layernorm(x).to(target.dtype)).float()
        if index % target.geometry.attn_res_block_size == 0:
            bank.append(stream)
            stream = attended
        else:
            stream = stream + attended
        x = mixed(layer.mlp_res_proj, layer.mlp_res_norm)
        stream = stream + layer.feed_forward(layer.post_attention_layernorm(x).to(target.dtype)).float()
    body = target.model
    return body.norm(mixed(body.output_attn_res_proj, body.output_attn_res_norm)).to(target.dtype)


def graphed(step: Callable[[], None], note: Callable[[str], None]) -> Callable[[], None]:
    """The step as one CUDA graph, or as it is where that fails. The step is taken twice meanwhile."""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        note(f"no CUDA graph of a step, goes on without: {error}")
        return step
    return graph.replay


class Decoder:
    """B sequences of L tokens. `text` [B, L] holds ids, `written` [B, L] tells which were drawn."""

    def __init__(
        self, target: Network, batch: int, length: int, temperature: float, ends: Collection[int]
    ) -> None:
        self._target = target
        self._temperature = temperature
        geometry, device = target.geometry, target.lm_head.weight.device
        self._length = length
        self._rows = torch.arange(batch, device=device)
        self._columns = torch.arange(length, device=device)
        self._ends = torch.tensor(sorted(ends), device=device)
        self.text = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.written = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.known = torch.zeros(batch, dtype=torch.long, device=device)
        """How many tokens of each sequence stand."""
        self.at = torch.zeros(batch, dtype=torch.long, device=device)
        """Which token of each is fed next."""
        self.is_waiting = torch.zeros(batch, dtype=torch.bool, device=device)
        self.states: dict[int, Tensor] = {}
        self.tails: dict[int, tuple[Tensor, ...]] = {}
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        inner = geometry.kda_heads * geometry.kda_head_dim
        width = geometry.qk_nope_head_dim + geometry.qk_rope_head_dim
        for index in range(geometry.num_hidden_layers):
            if index in geometry.full_attention_layers:
                shape = (batch, geometry.num_attention_heads, length, width)
                k, v = (torch.zeros(shape, dtype=target.dtype, device=device) for _ in range(2))
                self.cache[index] = k, v
            else:
                size = geometry.kda_head_dim
                self.states[index] = torch.zeros(batch, geometry.kda_heads, size, size, device=device)
                past = (batch, geometry.conv_kernel_size - 1, inner)
                q, k, v = (torch.zeros(past, dtype=target.dtype, device=device) for _ in range(3))
                self.tails[index] = q, k, v

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], prefilled: int) -> None:
        """Give all sequences their beginnings; `prefilled` tokens of each (a multiple of 64) run at once."""
        texts = [list(prompt[: self._length]) for prompt in prompts]
        assert prefilled % delta.CHUNK_TOKENS == 0 and 0 < prefilled < min(map(len, texts))
        self.give(dict(enumerate(texts)))
        rows = max(1, _PREFILL_TOKENS // prefilled)
        for start in range(0, len(texts), rows):
            self._prefill(slice(start, min(len(texts), start + rows)), prefilled)
        self.at.fill_(prefilled)

    def give(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Append ids to sequences, which go on. What does not fit is dropped."""
        device = self.text.device
        known: list[int] = self.known.tolist()
        rows: list[int] = []
        columns: list[int] = []
        values: list[int] = []
        for row, ids in texts.items():
            fitting = ids[: self._length - known[row]]
            rows += [row] * len(fitting)
            columns += range(known[row], known[row] + len(fitting))
            values += fitting
            known[row] += len(fitting)
        self.text[torch.tensor(rows, device=device), torch.tensor(columns, device=device)] = torch.tensor(
            values, device=device
        )
        self.known.copy_(torch.tensor(known, device=device))
        self.is_waiting[torch.tensor(list(texts), device=device)] = False

    @torch.no_grad()
    def step(self) -> None:
        """Feed every sequence that has something to feed its next token."""
        target, rows = self._target, self._rows
        is_active = (self.at < self.known) & ~self.is_waiting & (self.at < self._length - 1)
        at = self.at.clamp(max=self._length - 1)
        mask = (self._columns <= at.unsqueeze(1))[:, None, None]

        def attend(index: int, layer: Layer, x: Tensor) -> Tensor:
            attention = layer.self_attn
            if isinstance(attention, LatentAttention):
                q, k, v = attention.before(x)
                keys, values = self.cache[index]
                keys[rows, :, at] = k
                values[rows, :, at] = v
                read = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, attn_mask=mask)
                return attention.after(x, read.squeeze(2))
            assert isinstance(attention, DeltaAttention)
            return self._delta_step(index, attention, x, is_active)

        logits = target.lm_head(through(target, self.text[rows, at], attend)).float()
        if self._temperature > 0:
            chances = (logits / self._temperature).softmax(-1)
            drawn = (chances / torch.empty_like(chances).exponential_()).argmax(-1)
        else:
            drawn = logits.argmax(-1)
        after = (at + 1).clamp(max=self._length - 1)
        is_drawn = is_active & (after >= self.known)
        self.text[rows, after] = torch.where(is_drawn, drawn, self.text[rows, after])
        self.written[rows, after] = self.written[rows, after] | is_drawn
        self.known.copy_(torch.where(is_drawn, after + 1, self.known))
        self.is_waiting.logical_or_(is_drawn & torch.isin(drawn, self._ends))
        self.at.add_(is_active)

    def _delta_step(self, index: int, attention: DeltaAttention, x: Tensor, is_active: Tensor) -> Tensor:
        geometry = self._target.geometry
        heads, width = geometry.kda_heads, geometry.kda_head_dim
        shape = (-1, heads, width)
        q, k, v = (
            _convolve(conv, proj(x), tail, is_active).view(shape)
            for conv, proj, tail in zip(
                (attention.q_conv1d, attention.k_conv1d, attention.v_conv1d),
                (attention.q_proj, attention.k_proj, attention.v_proj),
                self.tails[index],
                strict=True,
            )
        )
        gate = attention.f_b_proj(attention.f_a_proj(x)).float().view(shape)
        gate = gate + attention.dt_bias.view(heads, width)
        decay = (geometry.gate_lower_bound * torch.sigmoid(attention.A_log.exp().unsqueeze(-1) * gate)).exp()
        beta = torch.sigmoid(attention.b_proj(x).float()).unsqueeze(-1)
        q, k = unit(q) * width**-0.5, unit(k)
        state = self.states[index] * decay.unsqueeze(2)
        error = beta * (v - (state @ k.unsqueeze(-1)).squeeze(-1))
        state = state + error.unsqueeze(-1) * k.unsqueeze(2)
        self.states[index].copy_(torch.where(is_active[:, None, None, None], state, self.states[index]))
        out = attention.o_norm((state @ q.unsqueeze(-1)).squeeze(-1)).flatten(1)
        return attention.o_proj((out * torch.sigmoid(attention.g_proj(x).float())).to(x.dtype))

    def _prefill(self, rows: slice, length: int) -> None:
        target = self._target
        heads = target.geometry.kda_heads
        ids = self.text[rows, :length]
        batch = len(ids)
        position = self._columns[:length].repeat(batch).unsqueeze(1)
        past = target.geometry.conv_kernel_size - 1
        has_past = (position >= torch.arange(1, past + 1, device=ids.device)).float()

        def attend(index: int, layer: Layer, x: Tensor) -> Tensor:
            attention = layer.self_attn
            if isinstance(attention, LatentAttention):
                q, k, v = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in attention.before(x))
                keys, values = self.cache[index]
                keys[rows, :, :length], values[rows, :, :length] = k, v
                read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                return attention.after(x, read.transpose(1, 2).flatten(0, 1))
            assert isinstance(attention, DeltaAttention)
            parts = attention.before(x, has_past)
            entering = delta.carry_over(parts, batch, heads)
            last, carry, writes = (
                part.view(batch, -1, heads, *part.shape[1:])[:, -1]
                for part in (entering, parts.carry, parts.writes)
            )
            self.states[index][rows] = last @ carry + writes
            end = x.unflatten(0, (batch, -1))[:, length - past :]
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            for tail, proj in zip(self.tails[index], projections, strict=True):
                tail[rows] = proj(end)
            return attention.after(x, parts, entering)

        through(target, ids.flatten(), attend)


def _convolve(conv: ShortConv, x: Tensor, tail: Tensor, is_active: Tensor) -> Tensor:
    """One step of a short convolution, [B, channels] float32; `tail` [B, kernel - 1, channels] moves on."""
    window = torch.cat((tail, x.unsqueeze(1)), 1)
    tail.copy_(torch.where(is_active[:, None, None], window[:, 1:], tail))
    return F.silu((window.float() * conv.weight[:, 0].T).sum(1))


def unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
