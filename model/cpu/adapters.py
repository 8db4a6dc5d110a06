"""The operators under the signatures that SGLang 0.5.23 calls.

Each function stands for one of SGLang's kernels, named in ``model/cpu/hooks.py``; it reorders arguments,
refuses what this platform doesn't serve, and leaves the arithmetic to the operator modules.
"""

from typing import Any

import torch
from torch import Tensor

from model.cpu import convolution, kda, norm, residual, sampling, slots, state, transfer


class UnsupportedError(NotImplementedError):
    """SGLang asked for a form of an operator that the CPU platform doesn't have."""


def _refuse(operator: str, what: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"{operator} on the CPU platform doesn't serve {what}: {remedy}")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    validate_data: bool = False,
    block_table: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolution of a prefill batch, ``x`` and result [dim, T]."""
    if cache_indices is None or has_initial_state is None or block_table is not None:
        raise _refuse("causal_conv1d_fn", "a batch without cached states", "keep the state cache enabled")
    lengths = torch.diff(query_start_loc).tolist()
    return convolution.convolve_sequences(
        x.t(),
        weight,
        bias,
        conv_states,
        lengths,
        cache_indices[: len(lengths)].tolist(),
        has_initial_state[: len(lengths)].tolist(),
        activate=activation in ("silu", "swish"),
    ).t()


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolution of decode or verify, ``x`` and result [B, dim] or [B, dim, T]."""
    if retrieve_next_token is not None or num_accept_tokens is not None or cache_seqlens is not None:
        raise _refuse("causal_conv1d_update", "draft trees", "use a draft chain (--speculative-eagle-topk 1)")
    if conv_state_indices is None:
        raise _refuse("causal_conv1d_update", "a batch without slots", "keep the state cache enabled")
    tokens = x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)
    out = convolution.convolve_step(
        tokens,
        weight,
        bias,
        conv_state,
        conv_state_indices,
        activate=activation in ("silu", "swish", True),
        windows=intermediate_conv_window,
        window_rows=intermediate_state_indices,
    )
    return out.squeeze(1) if x.dim() == 2 else out.transpose(1, 2)


def kda_extend(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    return_intermediate_states: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, None]:
    """KDA prefill; q, k, v [1, T, H, D], states [slots, H, V, K] advanced in place."""
    if A_log is None or dt_bias is None or not beta_is_raw:
        raise _refuse("KDA extend", "activated gates", "pass raw gates with A_log and dt_bias")
    if lower_bound is None or lower_bound < kda.LOWEST_GATE:
        raise _refuse(
            "KDA extend",
            f"gate_lower_bound {lower_bound}",
            f"the checkpoint's linear_attn_config needs a bound of at least {kda.LOWEST_GATE}",
        )
    inputs = kda.activate(q, k, v, g, beta, a_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    lengths = torch.diff(query_start_loc).tolist()
    chosen = cache_indices[: len(lengths)].long()
    if bool((chosen < 0).any()):
        raise _refuse("KDA extend", "padded requests", "start the server with --disable-cuda-graph")
    tracked: dict[int, int] = {}
    if options.get("track_chunk_idx") is not None:
        tracked = {i: n for i, n in enumerate(options["track_chunk_idx"].tolist()) if n >= 0}
    out, final, snapshots = kda.chunked(inputs, lengths, ssm_states[chosen].float(), tracked)
    ssm_states[chosen] = final.to(ssm_states.dtype)
    for row, snapshot in snapshots.items():
        options["track_state"][row] = snapshot
    shaped = out.to(v.dtype).view(v.shape)
    return (shaped, None) if return_intermediate_states else shaped


def kda_decode(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    lower_bound: float | None = None,
    **_: Any,
) -> Tensor:
    """KDA decode, one token a request; rows with a negative slot yield zeros."""
    inputs = kda.activate(q, k, v, a, b, a_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    chosen = cache_indices.long()
    if not bool((chosen < 0).any()):
        out, after = kda.step(inputs, ssm_states[chosen].float())
        ssm_states[chosen] = after.to(ssm_states.dtype)
        return out.to(v.dtype).view(v.shape)
    live = (chosen >= 0).nonzero().squeeze(1)
    part, after = kda.step(inputs.rows(live), ssm_states[chosen[live]].float())
    ssm_states[chosen[live]] = after.to(ssm_states.dtype)
    out = torch.zeros_like(inputs.v)
    out[live] = part
    return out.to(v.dtype).view(v.shape)


def kda_verify(
    self: Any,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: Tensor | None,
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """KDA over draft tokens; keeps each token's state in the buffer and leaves the pool as it was."""
    if retrieve_parent_token is not None or cache_ring:
        raise _refuse(
            "KDA verify",
            "draft trees or replayed rings",
            "use a chain without --enable-linear-replayssm-spec",
        )
    lengths: list[int] = torch.diff(query_start_loc).tolist()
    count = len(lengths)
    inputs = kda.activate(q, k, v, a, b, a_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    rows = inputs.rows(slice(0, sum(lengths)))
    # A padded request reads slot 0, which is reserved, and keeps nothing.
    before = ssm_states[cache_indices[:count].long().clamp(min=0)].float()
    out, after = kda.verify(rows, lengths, before)
    kept = ((cache_indices[:count] >= 0) & (intermediate_state_indices[:count] >= 0)).nonzero().squeeze(1)
    target = intermediate_state_indices[:count][kept].long()
    intermediate_states_buffer[target, : after.shape[1]] = after[kept].to(intermediate_states_buffer.dtype)
    whole = torch.zeros_like(inputs.v)
    whole[: out.shape[0]] = out
    return whole.to(v.dtype).view(v.shape)


def track_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Snapshot the masked requests' states of all layers."""
    n = batch_size
    state.snapshot_states(
        (conv_states_pool, ssm_states_pool), cache_indices[:n], mamba_track_mask[:n], mamba_track_indices[:n]
    )


def track_states_one_layer(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Snapshot the masked requests' states of one layer."""
    track_states_all_layers(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
    )


def scatter_states(
    dst: Tensor,
    src: Tensor,
    dst_indices_raw: Tensor,
    step_indices_raw: Tensor,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Commit the states after each request's accepted draft token."""
    state.commit_states(dst, src, targets=dst_indices_raw, accepted=step_indices_raw, rows=src_indices_raw)


def no_fused_windows(pairs: Any) -> bool:
    """Never take the fused scatter over several convolution pools."""
    return False


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Gated RMS norm without residual or bias."""
    if residual is not None or prenorm or bias is not None:
        raise _refuse("rms_norm_gated", "a residual or bias", "none of K3's layers has one")
    return norm.rms_norm_gated(x, g, weight, eps=eps, gate_activation=activation)


def mix_residuals(prefix_sum: Tensor, bank: Tensor, nvb: int, score_proj: Any, score_norm: Any) -> Tensor:
    """Attention residual mixture of the first ``nvb`` snapshots and the running sum."""
    from sglang.srt.layers.attn_residual import get_cw

    score = get_cw(score_proj, score_norm)
    return residual.mix_residuals(prefix_sum, bank[:, :nvb], score, eps=score_norm.variance_epsilon)


def get_last_loc(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """Slot of each request's last cached token."""
    return slots.last_slots(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def assign_req_to_token(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots to the requests' rows."""
    n = batch_size
    slots.assign_slots(req_to_token, req_pool_indices[:n], start_offset[:n], end_offset[:n], out_cache_loc)


def chain_speculative_sampling(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling of draft chains; fills ``predicts``, ``accept_index``, ``accept_token_num``."""
    if block_verification:
        raise _refuse("speculative sampling", "block verification", "leave SGLang's block verification off")
    accepted, sampled = sampling.verify_chain(
        candidates, target_probs, draft_probs, uniform_samples, uniform_samples_for_final_sampling
    )
    accept_token_num.copy_(accepted)
    step = torch.arange(candidates.shape[1]).unsqueeze(0)
    taken = step <= accepted.unsqueeze(1)
    accept_index[taken] = retrive_index[taken].to(accept_index.dtype)
    follows = step < accepted.unsqueeze(1)
    shifted = torch.roll(candidates, -1, dims=1)
    predicts[retrive_index[follows].long()] = shifted[follows].to(predicts.dtype)
    last = retrive_index.gather(1, accepted.unsqueeze(1)).squeeze(1).long()
    predicts[last] = sampled.to(predicts.dtype)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[Tensor],
    dst_ptrs: list[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from page-first host pools to the device."""
    transfer.load_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[Tensor], dst_ptrs: list[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """All layers from the device to page-first host pools."""
    transfer.save_layers(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer of one tensor from a page_first host pool to the device."""
    transfer.load_rows(src, dst, src_indices, dst_indices, layer_id, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of one tensor from the device to a page_first host pool."""
    transfer.save_rows(src_layers, dst, src_indices, dst_indices, item_size)


def transfer_kv_mamba_lf_pf(
    src_ptrs: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of one component of the states from the device to a page_first host pool."""
    transfer.save_rows(src_ptrs, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """One layer of keys and values from a page_first host pool to the device."""
    transfer.load_rows(src_k, dst_k, src_indices, dst_indices, layer_id, item_size)
    transfer.load_rows(src_v, dst_v, src_indices, dst_indices, layer_id, item_size)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    """All layers of keys and values from the device to a page_first host pool."""
    transfer.save_rows(src_k_layers, dst_k, src_indices, dst_indices, item_size)
    transfer.save_rows(src_v_layers, dst_v, src_indices, dst_indices, item_size)
