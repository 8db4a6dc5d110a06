"""The one table of what the CPU platform changes in SGLang.

Every row says what is changed, why, and the signature it was written for; ``apply_hooks`` refuses to go on
when one differs or doesn't take. Where SGLang has a registry (attention backends), that is used instead.
"""

import multiprocessing
from enum import Enum

import setproctitle
import torch

from model.cpu import adapters, around, page_hash
from model.cpu.names import BACKEND_NAME
from model.cpu.registry import ABSENT, Hook, HookError, Kind, apply, check, check_version

SGLANG_VERSION = "0.5.23"

_KDA = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"
_CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_STATE = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_HOST = "sglang.srt.mem_cache.pool_host"
_COPY = "host copies are CUDA kernels, which aren't imported on a CPU"

HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_CONV}.causal_conv1d_fn",
        Kind.REPLACE,
        adapters.causal_conv1d_fn,
        (
            "(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], conv_states: "
            "torch.Tensor, query_start_loc: torch.Tensor, seq_lens_cpu: List[int], cache_indices: "
            "Optional[torch.Tensor] = None, has_initial_state: Optional[torch.Tensor] = None, "
            "activation: Optional[str] = 'silu', pad_slot_id: int = -1, validate_data=False, "
            "block_table: Optional[torch.Tensor] = None, **kwargs)"
        ),
        "KDA's prefill convolution is a Triton kernel",
    ),
    Hook(
        f"{_CONV}.causal_conv1d_update",
        Kind.REPLACE,
        adapters.causal_conv1d_update,
        (
            "(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: "
            "Optional[torch.Tensor] = None, activation: Union[bool, str, NoneType] = None, "
            "cache_seqlens: Optional[torch.Tensor] = None, conv_state_indices: Optional[torch.Tensor]"
            " = None, num_accept_tokens: Optional[torch.Tensor] = None, intermediate_conv_window: "
            "Optional[torch.Tensor] = None, intermediate_state_indices: Optional[torch.Tensor] = "
            "None, retrieve_next_token: Optional[torch.Tensor] = None, retrieve_next_sibling: "
            "Optional[torch.Tensor] = None, retrieve_parent_token: Optional[torch.Tensor] = None, "
            "pad_slot_id: int = -1, metadata=None, validate_data=False)"
        ),
        "KDA's decode and verify convolution is a Triton kernel",
    ),
    Hook(
        f"{_KDA}.extend",
        Kind.REPLACE,
        adapters.kda_extend,
        (
            "(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: "
            "torch.Tensor, *, ssm_states: torch.Tensor, cache_indices: torch.Tensor, query_start_loc:"
            " torch.Tensor, A_log: Optional[torch.Tensor] = None, dt_bias: Optional[torch.Tensor] = "
            "None, lower_bound: Optional[float] = None, beta_is_raw: bool = False, "
            "return_intermediate_states: bool = False, **kwargs) -> tuple[torch.Tensor, torch.Tensor "
            "| None]"
        ),
        "KDA prefill is a Triton kernel",
    ),
    Hook(
        f"{_KDA}.decode",
        Kind.REPLACE,
        adapters.kda_decode,
        (
            "(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: "
            "torch.Tensor, *, A_log: torch.Tensor, dt_bias: torch.Tensor, ssm_states: torch.Tensor, "
            "cache_indices: torch.Tensor, query_start_loc: torch.Tensor, lower_bound: Optional[float]"
            " = None, **kwargs) -> torch.Tensor"
        ),
        "KDA decode is a Triton kernel",
    ),
    Hook(
        f"{_KDA}.target_verify",
        Kind.REPLACE,
        adapters.kda_verify,
        (
            "(self, A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: "
            "torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, ssm_states: torch.Tensor, "
            "cache_indices: torch.Tensor, query_start_loc: torch.Tensor, intermediate_states_buffer: "
            "torch.Tensor, intermediate_state_indices: torch.Tensor, cache_steps: int, "
            "retrieve_parent_token: Optional[torch.Tensor], lower_bound: Optional[float] = None, "
            "cache_ring: bool = False, replayssm_rawv: Optional[torch.Tensor] = None, replayssm_rawk:"
            " Optional[torch.Tensor] = None, replayssm_g: Optional[torch.Tensor] = None, "
            "replayssm_beta: Optional[torch.Tensor] = None, **kwargs) -> torch.Tensor"
        ),
        "KDA draft verification is a Triton kernel",
    ),
    Hook(
        f"{_KDA}.supports_packed_decode",
        Kind.SET,
        False,
        "True",
        "packed decode is one Triton kernel; decode is replaced above",
    ),
    Hook(
        f"{_KDA}.supports_fused_chain_verify",
        Kind.SET,
        False,
        "True",
        "fused verify is one Triton kernel; verify is replaced above",
    ),
    Hook(
        f"{_STATE}.track_mamba_states_all_layers",
        Kind.REPLACE,
        adapters.track_states_all_layers,
        (
            "(conv_states_pool: torch.Tensor, ssm_states_pool: torch.Tensor, cache_indices: "
            "torch.Tensor, mamba_track_mask: torch.Tensor, mamba_track_indices: torch.Tensor, "
            "batch_size: int, check_freed_slots: bool = False)"
        ),
        "state snapshots are a Triton kernel",
    ),
    Hook(
        f"{_STATE}.track_mamba_states_if_needed",
        Kind.REPLACE,
        adapters.track_states_one_layer,
        (
            "(conv_states: torch.Tensor, ssm_states: torch.Tensor, cache_indices: torch.Tensor, "
            "mamba_track_mask: torch.Tensor, mamba_track_indices: torch.Tensor, batch_size: int, "
            "check_freed_slots: bool = False)"
        ),
        "state snapshots are a Triton kernel",
    ),
    Hook(
        f"{_STATE}.fused_mamba_state_scatter_with_mask",
        Kind.REPLACE,
        adapters.scatter_states,
        (
            "(dst: torch.Tensor, src: torch.Tensor, dst_indices_raw: torch.Tensor, step_indices_raw: "
            "torch.Tensor, src_indices_raw: torch.Tensor | None = None)"
        ),
        "commits of verified states are a Triton kernel",
    ),
    Hook(
        f"{_STATE}.fused_conv_window_scatter_with_mask",
        Kind.REPLACE,
        adapters.scatter_states,
        (
            "(dst: torch.Tensor, src: torch.Tensor, dst_indices_raw: torch.Tensor, step_indices_raw: "
            "torch.Tensor, src_indices_raw: torch.Tensor | None = None)"
        ),
        "commits of verified windows are a Triton kernel",
    ),
    Hook(
        f"{_STATE}._conv_multi_eligible",
        Kind.REPLACE,
        adapters.no_fused_windows,
        "(pairs) -> bool",
        "the fused commit of all windows is a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated",
        Kind.REPLACE,
        adapters.rms_norm_gated,
        (
            "(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation:"
            " str = 'swish', residual: torch.Tensor | None = None, prenorm: bool = False, "
            "residual_in_fp32: bool = False, eps: float = 1e-06)"
        ),
        "the gated norm is a Triton kernel",
    ),
    Hook(
        "sglang.srt.layers.attn_residual._mix_fused",
        Kind.REPLACE,
        adapters.mix_residuals,
        (
            "(prefix_sum: torch.Tensor, bank: torch.Tensor, nvb: int, score_proj: "
            "sglang.srt.layers.linear.ReplicatedLinear, score_norm: "
            "sglang.srt.layers.layernorm.RMSNorm) -> torch.Tensor"
        ),
        "the attention residual mixture is a pair of Triton kernels",
    ),
    Hook(
        "sglang.srt.models.kimi_k3.KimiK3LinearModel.__init__",
        Kind.AROUND,
        around.without_cuda_streams,
        (
            "(self, config: sglang.srt.configs.kimi_linear.KimiLinearConfig, quant_config: "
            "Optional[sglang.srt.layers.quantization.base_config.QuantizationConfig] = None, prefix: "
            "str = '')"
        ),
        "builds torch.cuda.Stream outside HIP",
    ),
    Hook(
        "sglang.kernels.ops.memory.common.get_last_loc_triton",
        Kind.REPLACE,
        adapters.get_last_loc,
        (
            "(req_to_token: 'torch.Tensor', req_pool_indices_tensor: 'torch.Tensor', "
            "prefix_lens_tensor: 'torch.Tensor') -> 'torch.Tensor'"
        ),
        "paged allocation reads the last slot with a Triton kernel",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        Kind.REPLACE,
        adapters.assign_req_to_token,
        (
            "(req_pool_indices: 'torch.Tensor', req_to_token: 'torch.Tensor', start_offset: "
            "'torch.Tensor', end_offset: 'torch.Tensor', out_cache_loc: 'torch.Tensor', batch_size: "
            "'int')"
        ),
        "speculative allocation writes slots with a Triton kernel",
    ),
    Hook(
        "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        Kind.REPLACE,
        adapters.chain_speculative_sampling,
        (
            "(predicts, accept_index, accept_token_num, candidates, retrive_index, "
            "retrive_next_token, retrive_next_sibling, uniform_samples, "
            "uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, "
            "threshold_acc, deterministic, *, block_verification: bool = False)"
        ),
        "rejection sampling of drafts is a Triton kernel",
    ),
    Hook(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark",
        Kind.AROUND,
        around.dspark_device,
        "(server_args: 'ServerArgs') -> 'None'",
        "DSPARK refuses devices other than CUDA, NPU and XPU",
        in_server=True,
    ),
    Hook(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        Kind.REPLACE,
        around.no_copy_kernel,
        "(self)",
        "the draft's pool warms up a Triton copy kernel",
    ),
    Hook(
        "sglang.srt.models.dspark.DSparkDraftMixin._build_fused_kv_write_bundle",
        Kind.REPLACE,
        around.no_fused_write,
        "(self, pool) -> 'Optional[FusedKvWriteBundle]'",
        "the draft's fused KV write is a Triton kernel",
    ),
    Hook(
        "sglang.srt.models.dflash.DFlashAttention.__init__",
        Kind.AROUND,
        around.plain_rope,
        "(self, config, layer_id: 'int', quant_config=None, prefix: 'str' = '') -> 'None'",
        "the draft's table-driven norm and rope is a CUDA kernel",
    ),
    Hook(
        "sglang.srt.mem_cache.utils.get_native_hash",
        Kind.REPLACE,
        page_hash.page_hash,
        "(token_ids: Any, prior_digest: Optional[bytes], page_size: Optional[int] = None) -> str | list[str]",
        "compiled at the first look-up in storage; without the headers for it, nothing is ever restored",
    ),
    Hook(
        f"{_HOST}.base.HostKVCache.__init__",
        Kind.AROUND,
        around.unpinned,
        (
            "(self, *, dtype: 'torch.dtype', device_capacity_tokens: 'int', size_per_token: 'int', "
            "start_layer: 'int', end_layer: 'int', host_to_device_ratio: 'float', host_size: 'int', "
            "page_size: 'int', layout: 'str', pin_memory: 'bool', device: 'str', allocator_type: "
            "'str' = 'default', dcp_size: 'int' = 1, dcp_rank: 'int' = 0, pool_label: 'str' = 'kv', "
            "is_dummy: 'bool' = False, host_token_capacity: 'int | None' = None)"
        ),
        "host pools ask for pinned memory",
    ),
    Hook(
        f"{_HOST}.mamba.MambaPoolHost.__init__",
        Kind.AROUND,
        around.unpinned,
        (
            "(self, buffer_info: 'MambaStateBufferInfo', host_to_device_ratio: 'float', host_size: "
            "'int', *, device_capacity: 'int', pin_memory: 'bool' = True, device: 'str' = 'cpu', "
            "allocator_type: 'str' = 'default', layout: 'str' = 'layer_first', "
            "mtp_draft_buffer_infos: 'Sequence[MambaStateBufferInfo]' = ())"
        ),
        "host pools ask for pinned memory",
    ),
    Hook(
        f"{_HOST}.mla.MLATokenToKVPoolHost.__init__",
        Kind.AROUND,
        around.unpinned,
        (
            "(self, buffer_info: 'MLABufferInfo | MLAHostAllocation', host_to_device_ratio: 'float', "
            "host_size: 'int', page_size: 'int', layout: 'str', pin_memory: 'bool' = True, device: "
            "'str' = 'cpu', allocator_type: 'str' = 'default', override_kv_cache_dim: 'Optional[int]'"
            " = None, draft_buffer_infos: 'Sequence[MLABufferInfo]' = (), dcp_size: 'int' = 1, "
            "dcp_rank: 'int' = 0, *, device_capacity_tokens: 'int', start_layer: 'int', end_layer: "
            "'int', target_layer_num: 'int', layer_shard_enabled: 'bool' = False, pool_label: 'str' ="
            " 'kv', host_token_capacity: 'int | None' = None)"
        ),
        "host pools ask for pinned memory",
    ),
    Hook(
        f"{_HOST}.mha.MHATokenToKVPoolHost.__init__",
        Kind.AROUND,
        around.unpinned,
        (
            "(self, buffer_info: 'MHABufferInfo', host_to_device_ratio: 'float', host_size: 'int', "
            "page_size: 'int', layout: 'str', pin_memory: 'bool' = True, device: 'str' = 'cpu', "
            "allocator_type: 'str' = 'default', *, device_capacity_tokens: 'int', start_layer: 'int',"
            " end_layer: 'int', draft_buffer_infos: 'Sequence[MHABufferInfo]' = (), "
            "write_back_staging: 'tuple[torch.Tensor, torch.Tensor] | None' = None, pool_label: 'str'"
            " = 'kv', head_group_num: 'int' = 1, host_token_capacity: 'int | None' = None)"
        ),
        "host pools ask for pinned memory",
    ),
    Hook(
        f"{_HOST}.common._cuda_host_register",
        Kind.REPLACE,
        around.no_registration,
        "(buffer: 'torch.Tensor', registration_granularity_bytes: 'int | None' = None) -> 'None'",
        "host pools are registered with CUDA",
    ),
    Hook(
        "torch.Tensor.pin_memory",
        Kind.SET,
        around.keep_pageable,
        "<method_descriptor>",
        "SGLang pins small host tensors without asking whether that is possible",
    ),
    Hook(
        "torch.Tensor.record_stream",
        Kind.SET,
        around.no_stream_record,
        "<method_descriptor>",
        "SGLang marks tensors for streams that a CPU lacks",
    ),
    *(
        Hook(f"{_HOST}.{pool}.{name}", Kind.SET, copy, ABSENT, _COPY)
        for pool, name, copy in (
            *(
                (pool, copy.__name__, copy)
                for pool in ("mla", "mamba", "mha")
                for copy in (
                    adapters.transfer_kv_per_layer_direct_pf_lf,
                    adapters.transfer_kv_all_layer_direct_lf_pf,
                )
            ),
            ("mla", "transfer_kv_per_layer_mla_pf_lf", adapters.transfer_kv_per_layer_mla_pf_lf),
            ("mla", "transfer_kv_all_layer_mla_lf_pf", adapters.transfer_kv_all_layer_mla_lf_pf),
            ("mamba", "transfer_kv_mamba_pf_lf", adapters.transfer_kv_per_layer_mla_pf_lf),
            ("mamba", "transfer_kv_mamba_lf_pf", adapters.transfer_kv_mamba_lf_pf),
            ("mha", "transfer_kv_per_layer_pf_lf", adapters.transfer_kv_per_layer_pf_lf),
            ("mha", "transfer_kv_all_layer_lf_pf", adapters.transfer_kv_all_layer_lf_pf),
        )
    ),
)


class Process(Enum):
    """SGLang's processes, which load plug-ins alike."""

    SERVER = "server"  # resolves the arguments, then tokenizes and serves HTTP
    WORKER = "worker"  # schedules and runs the model
    DETOKENIZER = "detokenizer"


def this_process() -> Process:
    """Which of them we are: the server has no parent, the detokenizer has named itself by then."""
    if multiprocessing.parent_process() is None:
        return Process.SERVER
    return Process.DETOKENIZER if "detokenizer" in setproctitle.getproctitle() else Process.WORKER


def apply_hooks(process: Process) -> None:
    """Put the hooks in place that this process needs.

    The server checks the whole table, so that it ends before it starts workers that would.

    Raises:
        HookError: SGLang isn't the version, or a target isn't the function, that the table knows.
    """
    if process is Process.DETOKENIZER:
        return
    check_version(SGLANG_VERSION)
    if torch.cuda.is_available():
        raise HookError(
            "the CPU platform is selected and a GPU is visible: set CUDA_VISIBLE_DEVICES= (empty)"
        )
    _register_backend_name()
    if process is Process.SERVER:
        check(HOOKS)
        apply(hook for hook in HOOKS if hook.in_server)
    else:
        _register_backend()
        apply(HOOKS)


def _register_backend_name() -> None:
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND_NAME])
        choices.add_draft_attention_backend_choices([BACKEND_NAME])


def _register_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from model.cpu.backend import CpuAttentionBackend

    def absorbed(attention: object, forward_batch: object) -> AttnForwardMethod:
        # In every mode: the latent row is all that the pool holds.
        return AttnForwardMethod.MLA

    register_attention_backend(BACKEND_NAME)(CpuAttentionBackend)
    AttentionBackendRegistry.register(BACKEND_NAME, absorbed)
