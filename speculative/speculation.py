"""Greedy decoding with a draft by the trainer's own networks, many sequences at once.

What an engine does each round: the draft proposes a block behind the last token, the target verifies it in
one pass, the longest prefix that it would have written itself is kept, and one token of its own is added.
KDA's states are kept for every token of the block, so that the one behind the last accepted one can be taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.training import delta
from model.training.attention import DeltaAttention, LatentAttention
from model.training.network import Layer, Network
from speculative.decoding import Decoder, through, unit
from speculative.network import DraftNetwork, rotate
from speculative.network import Layer as DraftLayer


class _Pending(NamedTuple):
    """What a KDA layer would hold behind each token of a block: states [T, B, H, V, K], and its convolutions'
    inputs with those before the block, each [B, kernel - 1 + T, channels]."""

    states: Tensor
    windows: tuple[Tensor, ...]


class Speculator:
    """B sequences of L tokens, decoded greedily. `decoder` holds the texts and the target's states."""

    def __init__(self, target: Network, draft: DraftNetwork, batch: int, length: int) -> None:
        self._target = target
        self._draft = draft
        self.decoder = Decoder(target, batch, length, 0.0, ())
        device = target.lm_head.weight.device
        config = draft.config
        # With the block's own, whole eights of keys, as fused kernels want them.
        places = length + -config.block_size % 8
        shape = (batch, config.kv_heads, places, config.head_dim)
        self._dtype = draft.fc.weight.dtype
        self._context = [
            (
                torch.zeros(shape, dtype=self._dtype, device=device),
                torch.zeros(shape, dtype=self._dtype, device=device),
            )
            for _ in range(config.layers)
        ]
        self._rows = torch.arange(batch, device=device).unsqueeze(1)
        self._columns = torch.arange(length, device=device)
        self._context_columns = torch.arange(places, device=device)
        self._offset = torch.arange(config.block_size + 1, device=device)
        self.accepted = torch.zeros(batch, dtype=torch.long, device=device)
        """Proposals of the last round that were kept."""

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Give all sequences their beginnings, each longer than 64 tokens."""
        decoder, chunk = self.decoder, delta.CHUNK_TOKENS
        longest = max(map(len, prompts))
        decoder.known.zero_()
        decoder.begin(prompts, (min(map(len, prompts)) - 1) // chunk * chunk)
        while True:  # all but the last token of each
            decoder.is_waiting.copy_(decoder.at >= decoder.known - 1)
            if decoder.is_waiting.all():
                break
            decoder.step()
        decoder.is_waiting.zero_()
        # What stands behind the shorter ones is overwritten before it is read.
        ids = decoder.text[:, : min(decoder.text.shape[1], -(-longest // chunk) * chunk)]
        _, taps = self._target(ids, self._draft.config.target_layers)
        self._see(
            torch.cat(taps, -1).unflatten(0, ids.shape), self._columns[: ids.shape[1]].expand(ids.shape)
        )

    @torch.no_grad()
    def round(self) -> None:
        """Propose, verify, keep."""
        decoder, offset = self.decoder, self._offset
        block = len(offset) - 1
        at = decoder.at.unsqueeze(1)
        anchor = decoder.text.gather(1, at)
        proposed = self._propose(anchor, at + offset[:block], at)
        tokens = torch.cat((anchor, proposed), 1)
        positions = at + offset
        pending: dict[int, _Pending] = {}
        hidden, taps = self._verify(tokens, positions, pending)
        greedy = self._target.lm_head(hidden).float().argmax(-1).view_as(tokens)
        kept = (greedy[:, :block] == proposed).long().cumprod(1).sum(1)
        decoder.text.scatter_(1, positions + 1, greedy)
        self._keep(pending, kept)
        self._see(taps.unflatten(0, tokens.shape), positions)
        self.accepted.copy_(kept)
        decoder.at.add_(kept + 1)
        decoder.known.copy_(decoder.at + 1)

    def _see(self, features: Tensor, positions: Tensor) -> None:
        """Write the draft's keys and values of context [B, T] from the target's captures there."""
        draft = self._draft
        context = draft.hidden_norm(draft.fc(features.to(self._dtype)))
        for layer, (keys, values) in zip(draft.layers, self._context, strict=True):
            assert isinstance(layer, DraftLayer)
            k, v = layer.self_attn.keys_values(context, positions)
            keys[self._rows, :, positions] = k.transpose(1, 2)
            values[self._rows, :, positions] = v.transpose(1, 2)

    def _propose(self, anchor: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """The draft's block behind anchors [B, 1], [B, block]."""
        draft, target = self._draft, self._target
        config = draft.config
        block = config.block_size
        tokens = torch.cat((anchor, torch.full_like(positions[:, 1:], config.mask_token)), 1)
        own = torch.ones(len(tokens), block, dtype=torch.bool, device=tokens.device)
        mask = torch.cat((self._context_columns < at, own), 1)[:, None, None]
        x = target.model.embed_tokens(tokens).to(self._dtype)
        repeats = config.heads // config.kv_heads
        for layer, context in zip(draft.layers, self._context, strict=True):
            assert isinstance(layer, DraftLayer)
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            q = attention.q_norm(attention.q_proj(y).unflatten(-1, (config.heads, config.head_dim)))
            q = rotate(q.transpose(1, 2), positions, config.rope_theta)
            k, v = (
                torch.cat(pair, 2).repeat_interleave(repeats, 1)
                for pair in zip(context, attention.keys_values(y, positions), strict=True)
            )
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + attention.o_proj(read.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        base = target.lm_head(draft.norm(x).to(target.dtype)).float()
        previous = anchor[:, 0]
        found: list[Tensor] = []
        for k in range(block):
            previous = (base[:, k] + draft.bias(draft.codes(previous)).float()).argmax(-1)
            found.append(previous)
        return torch.stack(found, 1)

    def _verify(
        self, tokens: Tensor, positions: Tensor, pending: dict[int, _Pending]
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states and captures of tokens [B, T], flat."""
        decoder, target = self.decoder, self._target
        batch, count = tokens.shape
        mask = (self._columns <= positions.unsqueeze(-1)).unsqueeze(1)

        def attend(index: int, layer: Layer, x: Tensor) -> Tensor:
            attention = layer.self_attn
            if isinstance(attention, LatentAttention):
                q, k, v = (part.unflatten(0, (batch, count)) for part in attention.before(x))
                keys, values = decoder.cache[index]
                keys[self._rows, :, positions] = k
                values[self._rows, :, positions] = v
                read = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
                return attention.after(x, read.transpose(1, 2).flatten(0, 1))
            assert isinstance(attention, DeltaAttention)
            out, pending[index] = self._delta_block(index, attention, x, batch)
            return out

        captured: dict[int, Tensor] = {}
        hidden = through(target, tokens.flatten(), attend, captured)
        return hidden, torch.cat([captured[tap] for tap in self._draft.config.target_layers], -1)

    def _delta_block(
        self, index: int, attention: DeltaAttention, x: Tensor, batch: int
    ) -> tuple[Tensor, _Pending]:
        geometry = self._target.geometry
        heads, width, kernel = geometry.kda_heads, geometry.kda_head_dim, geometry.conv_kernel_size
        windows: list[Tensor] = []
        convolved: list[Tensor] = []
        for conv, proj, tail in zip(
            (attention.q_conv1d, attention.k_conv1d, attention.v_conv1d),
            (attention.q_proj, attention.k_proj, attention.v_proj),
            self.decoder.tails[index],
            strict=True,
        ):
            window = torch.cat((tail, proj(x).unflatten(0, (batch, -1))), 1)
            windows.append(window)
            seen = window.float().unfold(1, kernel, 1)  # [B, T, channels, kernel]
            convolved.append(F.silu((seen * conv.weight[:, 0]).sum(-1)).unflatten(-1, (heads, width)))
        q, k, v = unit(convolved[0]) * width**-0.5, unit(convolved[1]), convolved[2]
        gate = attention.f_b_proj(attention.f_a_proj(x)).float().view(batch, -1, heads, width)
        gate = gate + attention.dt_bias.view(heads, width)
        decay = (geometry.gate_lower_bound * torch.sigmoid(attention.A_log.exp().unsqueeze(-1) * gate)).exp()
        beta = torch.sigmoid(attention.b_proj(x).float()).view(batch, -1, heads, 1)
        state = self.decoder.states[index]
        states: list[Tensor] = []
        outs: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * decay[:, t].unsqueeze(2)
            error = beta[:, t] * (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1))
            state = state + error.unsqueeze(-1) * k[:, t].unsqueeze(2)
            states.append(state)
            outs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
        out = attention.o_norm(torch.stack(outs, 1)).flatten(0, 1).flatten(1)
        out = attention.o_proj((out * torch.sigmoid(attention.g_proj(x).float())).to(x.dtype))
        return out, _Pending(torch.stack(states), tuple(windows))

    def _keep(self, pending: dict[int, _Pending], kept: Tensor) -> None:
        """Move KDA's states behind the last kept token of each sequence."""
        rows = self._rows[:, 0]
        past = self._target.geometry.conv_kernel_size - 1
        window_at = kept.unsqueeze(1) + 1 + self._offset[:past]
        for index, found in pending.items():
            self.decoder.states[index].copy_(found.states[kept, rows])
            for tail, window in zip(self.decoder.tails[index], found.windows, strict=True):
                tail.copy_(window[self._rows, window_at])
