"""Sizes and budgets, against SGLang's own calculators where they are marked so."""

import json
import types

import pytest

from model.capacity.budget import RUNTIME_BYTES, budget, split
from model.capacity.geometry import Geometry
from model.capacity.machine import MACHINES
from model.profile import load_profile
from service.cli import main

# The released checkpoint's config.json, as far as sizes go.
RELEASED = {
    "text_config": {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, 92) if layer % 4],
            "full_attn_layers": [*range(4, 93, 4), 93],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 1048576,
    }
}


def test_the_released_geometry_is_the_default():
    assert Geometry.from_config(RELEASED) == Geometry()


def test_sizes_of_the_released_model():
    geometry = Geometry()
    assert (geometry.kv_bytes(), geometry.kv_bytes("fp8")) == (27_648, 13_824)
    assert (geometry.state_bytes(), geometry.state_bytes("bf16")) == (449_372_160, 232_316_928)
    assert geometry.state_bytes(ranks=8) * 8 == geometry.state_bytes()
    assert 1.4e12 < geometry.weight_bytes < 1.6e12


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_budget_fits_the_memory_that_it_is_made_of(name, kv):
    machine = MACHINES[name]
    found = budget(machine, load_profile(machine.profile), Geometry(), kv=kv)
    if found.short_bytes:
        assert name == "h200-8" and found.kv_tokens == found.state_slots == 0
        return
    used = found.weight_bytes + RUNTIME_BYTES + found.kv_tokens * found.kv_bytes_per_token
    used += (found.state_slots + 1) * found.state_bytes_per_rank
    page_bytes = 64 * found.kv_bytes_per_token
    assert found.static_bytes - page_bytes < used <= found.static_bytes <= found.hbm_bytes


@pytest.mark.sglang
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_a_state_has_the_size_that_sglang_gives_it(ranks, monkeypatch):
    import sglang.srt.configs.kimi_linear as kimi_linear

    monkeypatch.setattr(kimi_linear, "get_parallel", lambda: types.SimpleNamespace(attn_tp_size=ranks))
    config = kimi_linear.KimiLinearConfig(**RELEASED["text_config"])
    assert config.mamba2_cache_params.mamba_cache_per_req == Geometry().state_bytes(ranks=ranks)
    assert len(config.full_attention_layer_ids) == 24


@pytest.mark.sglang
def test_a_token_of_kv_has_the_size_that_sglang_gives_it(monkeypatch):
    import torch
    from sglang.srt.mem_cache import kv_cache_configurator

    monkeypatch.setattr(kv_cache_configurator, "is_deepseek_dsa", lambda config: False)
    model = types.SimpleNamespace(hf_config=None, kv_lora_rank=512, qk_rope_head_dim=64)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        width = kv_cache_configurator.calculate_mla_kv_cache_dim(model_config=model, kv_cache_dtype=dtype)
        assert width * 24 * dtype.itemsize == Geometry().kv_bytes(name)


@pytest.mark.sglang
@pytest.mark.parametrize("ratio", [0.08, 0.15, 0.9])
def test_memory_is_parted_as_sglang_parts_it(ratio, monkeypatch):
    from sglang.srt.mem_cache import kv_cache_configurator as module

    state, kv, rest = Geometry().state_bytes(ranks=8), Geometry().kv_bytes(), 47_800_000_000
    schedule = types.SimpleNamespace(max_mamba_cache_size=None, mamba_full_memory_ratio=ratio)
    context = types.SimpleNamespace(override=lambda reason, **values: schedule.__dict__.update(values))
    mamba = types.SimpleNamespace(enable_linear_replayssm_spec=False)
    monkeypatch.setattr(module, "get_schedule", lambda: schedule)
    monkeypatch.setattr(module, "get_context", lambda: context)
    monkeypatch.setattr(module, "get_exec", lambda: types.SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(module, "get_memory", lambda: types.SimpleNamespace(disable_radix_cache=False))
    params = types.SimpleNamespace(layers=list(range(69)), mamba_cache_per_req=state)
    configurator = types.SimpleNamespace(
        mambaish_config=types.SimpleNamespace(mamba2_cache_params=params),
        hybrid_gdn_config=None,
        hybrid_kda_config=params,
        pp_size=1,
        attn_dp_size=1,
        extra_mamba_cache_bytes_per_req=0,
        spec_algorithm=types.SimpleNamespace(is_none=lambda: True),
        fused_entry_bytes=lambda kind: None,
    )
    left = module.KVCacheConfigurator._handle_max_mamba_cache(configurator, rest / (1 << 30))
    tokens, slots = split(rest, ratio, kv, state, 64)
    assert slots == schedule.max_mamba_cache_size
    assert tokens == int(left * (1 << 30)) // kv // 64 * 64


@pytest.mark.slow
def test_the_command_plans_for_sessions(capsys):
    arguments = ["plan", "--sessions", "6", "--turns", "8", "--requests", "150", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["budget"]["state_slots"] == 110
    points = {(point["policy"], point["concurrency"]): point for point in found["points"]}
    assert {3, 6, 12} <= {count for _, count in points}
    assert points["sglang", 4]["hit_ratio"] > 0.9 > 0.5 > points["sglang", 48]["hit_ratio"]
    assert found["breaks_at"]["sglang"] <= 48


@pytest.mark.slow
def test_the_command_says_what_does_not_fit(capsys):
    assert main(["plan", "--hardware", "h200-8"]) == 1
    assert "does not fit: 77.1 GB a GPU are lacking" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--trace", "nowhere.json"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["plan", "--kv-tokens", "0"]) == 2
    assert "--kv-tokens: must be over 0" in capsys.readouterr().err
    assert main(["plan", "--kv-tokens", "1000", "--sessions", "4"]) == 2
    assert "raise --kv-tokens" in capsys.readouterr().err
