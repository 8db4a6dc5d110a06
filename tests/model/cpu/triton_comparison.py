"""Runs SGLang's Triton kernels in Triton's interpreter beside our operators, and prints the differences.

A script of its own because the interpreter is chosen before Triton is imported. One JSON object: for each
compared tensor the largest difference.
"""

import json
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from sglang.kernels.ops.attention.fla.fused_norm_gate import rms_norm_gated
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba import causal_conv1d_triton, mamba_state_scatter_triton
from sglang.kernels.ops.memory.common import get_last_loc_triton
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton
from sglang.srt.layers import attn_residual
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func

from model.cpu import adapters

HEADS, WIDTH, SLOTS = 2, 16, 5
differences: dict[str, float] = {}


def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape or ours.numel() == theirs.numel(), (
        f"{name}: {ours.shape} {theirs.shape}"
    )
    differences[name] = float((ours.reshape(theirs.shape).float() - theirs.float()).abs().max())


def delta_rule(*lengths: int) -> dict[str, torch.Tensor]:
    tokens = sum(lengths)
    return {
        "q": torch.randn(1, tokens, HEADS, WIDTH),
        "k": torch.randn(1, tokens, HEADS, WIDTH),
        "v": torch.randn(1, tokens, HEADS, WIDTH),
        "a": torch.randn(1, tokens, HEADS, WIDTH),
        "b": torch.randn(1, tokens, HEADS),
        "A_log": torch.log(torch.rand(HEADS) * 15 + 1).view(1, 1, HEADS, 1),
        "dt_bias": torch.randn(HEADS * WIDTH) * 0.5 - 2,
        "starts": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def decode() -> None:
    x, states = delta_rule(1, 1), torch.randn(SLOTS, HEADS, WIDTH, WIDTH)
    ours, slots = states.clone(), torch.tensor([2, 4], dtype=torch.int32)
    theirs_out = fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        q=x["q"],
        k=x["k"],
        v=x["v"],
        a=x["a"].reshape(2, -1),
        b=x["b"],
        initial_state_source=states,
        initial_state_indices=slots,
        cu_seqlens=x["starts"],
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=True,
        lower_bound=-5.0,
    )
    ours_out = adapters.kda_decode(
        None,
        x["q"],
        x["k"],
        x["v"],
        x["a"].reshape(2, -1),
        x["b"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        ssm_states=ours,
        cache_indices=slots,
        query_start_loc=x["starts"],
        lower_bound=-5.0,
    )
    compare("decode output", ours_out, theirs_out)
    compare("decode states", ours, states)


def verify() -> None:
    x, states = delta_rule(5, 5), torch.randn(SLOTS, HEADS, WIDTH, WIDTH)
    slots, rows = torch.tensor([2, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    steps = torch.zeros(3, 5, HEADS, WIDTH, WIDTH)
    our_steps, our_states = steps.clone(), states.clone()
    theirs_out = fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        q=x["q"],
        k=x["k"],
        v=x["v"],
        a=x["a"],
        b=x["b"],
        initial_state_source=states,
        initial_state_indices=slots,
        cu_seqlens=x["starts"],
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=True,
        lower_bound=-5.0,
        disable_state_update=True,
        intermediate_states_buffer=steps,
        intermediate_state_indices=rows,
        cache_steps=5,
        retrieve_parent_token=None,
    )
    ours_out = adapters.kda_verify(
        None,
        x["A_log"],
        x["dt_bias"],
        x["q"],
        x["k"],
        x["v"],
        x["a"],
        x["b"],
        ssm_states=our_states,
        cache_indices=slots,
        query_start_loc=x["starts"],
        intermediate_states_buffer=our_steps,
        intermediate_state_indices=rows,
        cache_steps=5,
        retrieve_parent_token=None,
        lower_bound=-5.0,
    )
    compare("verify output", ours_out, theirs_out)
    compare("verify steps", our_steps, steps)
    compare("verify states", our_states, states)


def convolution() -> None:
    dim, lengths = 8, [5, 2]
    pool, weight = torch.randn(SLOTS, 3, dim), torch.randn(dim, 4)
    ours = pool.clone()
    slots = torch.tensor([3, 1], dtype=torch.int32)
    inputs = torch.randn(dim, sum(lengths))
    starts = torch.tensor([0, 5, 7], dtype=torch.int32)
    continued = torch.tensor([True, False])
    arguments = {
        "has_initial_state": continued,
        "cache_indices": slots,
        "query_start_loc": starts,
        "seq_lens_cpu": lengths,
        "activation": "silu",
    }
    theirs_out = causal_conv1d_triton.causal_conv1d_fn(
        inputs, weight, None, conv_states=pool.transpose(-1, -2), **arguments
    )
    ours_out = adapters.causal_conv1d_fn(
        inputs, weight, None, conv_states=ours.transpose(-1, -2), **arguments
    )
    compare("convolution of a prefill", ours_out, theirs_out)
    compare("windows after a prefill", ours, pool)
    for tokens in (1, 5):
        step = torch.randn(2, dim, tokens)
        windows = torch.zeros(4, tokens, 3, dim)
        our_windows = windows.clone()
        rows = torch.tensor([0, 2], dtype=torch.int32)
        theirs_out = causal_conv1d_triton.causal_conv1d_update(
            step,
            pool.transpose(-1, -2),
            weight,
            None,
            activation="silu",
            conv_state_indices=slots,
            intermediate_conv_window=windows.transpose(-1, -2),
            intermediate_state_indices=rows,
        )
        ours_out = adapters.causal_conv1d_update(
            step,
            ours.transpose(-1, -2),
            weight,
            None,
            activation="silu",
            conv_state_indices=slots,
            intermediate_conv_window=our_windows.transpose(-1, -2),
            intermediate_state_indices=rows,
        )
        compare(f"convolution of {tokens}", ours_out, theirs_out)
        compare(f"windows after {tokens}", ours, pool)
        compare(f"kept windows of {tokens}", our_windows, windows)


def states() -> None:
    conv, ssm = torch.randn(2, SLOTS, 3, 8), torch.randn(2, SLOTS, HEADS, WIDTH, WIDTH)
    ours = conv.clone(), ssm.clone()
    running = torch.tensor([0, 1, 2], dtype=torch.int32)
    mask, tracked = torch.tensor([True, False, True]), torch.tensor([3, 4, 4])
    mamba_state_scatter_triton.track_mamba_states_all_layers(conv, ssm, running, mask, tracked, 3)
    adapters.track_states_all_layers(*ours, running, mask, tracked, 3)
    compare("tracked windows", ours[0], conv)
    compare("tracked states", ours[1], ssm)
    targets, step = torch.tensor([4, 1, 3]), torch.tensor([2, -1, 0])
    # The wrappers look at the device; the kernels don't care.
    torch.Tensor.is_cuda = property(lambda _: True)
    for name, scatter, shape in (
        ("states", mamba_state_scatter_triton.fused_mamba_state_scatter_with_mask, (HEADS, WIDTH, WIDTH)),
        ("windows", mamba_state_scatter_triton.fused_conv_window_scatter_with_mask, (3, 8)),
    ):
        for rows in (None, torch.tensor([2, 0, 1])):
            pool, steps = torch.randn(2, SLOTS, *shape), torch.randn(2, 3, 4, *shape)
            our_pool = pool.clone()
            scatter(pool, steps, targets, step, rows)
            adapters.scatter_states(our_pool, steps, targets, step, rows)
            compare(f"committed {name}, rows {rows}", our_pool, pool)
    del torch.Tensor.is_cuda


def norms() -> None:
    x, gate, weight = torch.randn(1, 6, HEADS, WIDTH), torch.randn(6, HEADS, WIDTH), torch.randn(WIDTH)
    compare(
        "gated norm",
        adapters.rms_norm_gated(x, gate, weight, None, "sigmoid", eps=1e-5),
        rms_norm_gated(x, gate, weight, None, "sigmoid", eps=1e-5),
    )
    projection = SimpleNamespace(weight=torch.randn(1, 1024))
    score = SimpleNamespace(weight=torch.randn(1024), variance_epsilon=1e-5)
    prefix, bank = torch.randn(3, 1024), torch.randn(3, 4, 1024)
    compare(
        "residual mixture",
        adapters.mix_residuals(prefix, bank, 3, projection, score),
        attn_residual._mix_fused(prefix, bank, 3, projection, score),
    )


def slots() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    requests, lengths = torch.tensor([3, 0, 1]), torch.tensor([4, 0, 10])
    compare(
        "last slots",
        adapters.get_last_loc(table, requests, lengths),
        get_last_loc_triton(table, requests, lengths),
    )
    starts, ends, new = torch.tensor([4, 0, 2]), torch.tensor([9, 0, 5]), torch.arange(100, 108)
    ours = table.clone()
    assign_req_to_token_pool_func(requests, table, starts, ends, new, 3)
    adapters.assign_req_to_token(requests, ours, starts, ends, new, 3)
    compare("assigned slots", ours, table)


def sampling() -> None:
    batch, drafted, vocabulary = 6, 3, 11
    target = torch.softmax(torch.randn(batch, drafted + 1, vocabulary), -1)
    draft = torch.softmax(torch.randn(batch, drafted, vocabulary), -1)
    candidates = torch.randint(0, vocabulary, (batch, drafted + 1))
    index = torch.arange(batch * (drafted + 1)).view(batch, drafted + 1)
    found = []
    coins, final = torch.rand(batch, drafted), torch.rand(batch)
    for sample in (chain_speculative_sampling_triton, adapters.chain_speculative_sampling):
        predicts = torch.full((batch * (drafted + 1),), -1, dtype=torch.int32)
        accept_index = torch.full((batch, drafted + 1), -1, dtype=torch.int32)
        counts = torch.zeros(batch, dtype=torch.int32)
        none = torch.zeros_like(index)
        sample(
            predicts,
            accept_index,
            counts,
            candidates,
            index,
            none,
            none,
            coins,
            final,
            target,
            draft,
            1.0,
            1.0,
            True,
        )
        found.append((predicts, accept_index, counts))
    for name, theirs, ours in zip(("predictions", "accepted", "counts"), *found, strict=True):
        compare(f"sampling: {name}", ours, theirs)
    differences["sampling: rejections seen"] = float((found[0][2] < drafted).any()) - 1


torch.manual_seed(0)
for part in (decode, verify, convolution, states, norms, slots, sampling):
    part()
print(json.dumps(differences))
