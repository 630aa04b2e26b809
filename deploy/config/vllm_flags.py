"""Compatibility with vLLM command lines: tables of vLLM's flags that are not flags of Quintet.

A flag is *renamed* (Quintet has it under another name), *accepted* (no effect; a log line says why), or *refused* with an
alternative. docs/vllm-flags.md is generated from these tables.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quintet.deploy.config.flag import option


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag that Quintet has under another name."""

    ours: str
    is_switch: bool = False
    convert: Callable[[object], object] | None = None
    """Converts its value to that of ``ours``."""


SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size", "-ep": "enable_expert_parallel", "-q": "quantization", "-n": "nnodes",
    "-r": "node_rank", "-asc": "api_server_count", "-sc": "speculative_config", "-cc": "compilation_config",
    "-ac": "attention_config", "-pcp": "prefill_context_parallel_size", "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local", "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend", "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb", "-dpm": "data_parallel_multi_port_external_lb", "-dc": "diffusion_config",
}  # fmt: skip
"""Short names of flags."""

RENAMED: dict[str, Renamed] = {
    "kv_cache_memory_bytes": Renamed("kv_cache_memory"),
    "sse_keep_alive_interval": Renamed("keep_alive_interval"),
    "api_server_count": Renamed("frontends"),
    "renderer_num_workers": Renamed("tokenizers"),
    "tokenizer_pool_size": Renamed("tokenizers"),
    "kv_offloading_size": Renamed("swap_space"),
    "max_num_queued_reqs": Renamed("max_queued_requests"),
    "max_num_queued_tokens": Renamed("max_queued_tokens"),
    "shutdown_timeout": Renamed("drain_timeout"),
    "convert": Renamed("runner"),
    "task": Renamed("runner"),
    "override_pooler_config": Renamed("pooler_config"),
    "enable_log_requests": Renamed("log_requests", is_switch=True),
    "disable_log_requests": Renamed("log_requests", is_switch=True, convert=operator.not_),
}
"""Key of vLLM's flag -> Quintet's flag."""

HUB = {"download_dir": "HF_HUB_CACHE", "hf_token": "HF_TOKEN"}
"""Flags that set an environment variable of huggingface_hub in this process."""

ROPE = ("rope_scaling", "rope_theta")
"""Flags of older vLLM versions, merged into ``--hf-overrides``."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "set --kv-cache-memory",
    "VLLM_CPU_OMP_THREADS_BIND": "set --threads",
    "VLLM_LOGGING_LEVEL": "set --log-level",
    "VLLM_USE_MODELSCOPE": "models are downloaded from the Hugging Face hub; give a folder as MODEL",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "extend the context with --hf-overrides",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are loaded at start: --lora-modules",
    "VLLM_SERVER_DEV_MODE": "its endpoints are not served",
    "VLLM_BATCH_INVARIANT": "set --batch-invariant for a GPU; a CPU is always batch-invariant",
}
"""Environment variables of vLLM that change its behaviour, and what to do here. Others are ignored without a note."""

DRAFTS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Flag -> key of ``--speculative-config``."""

_MULTIMODAL = "multimodal inputs are not supported"
_TORCH = "torch.compile is not used"
_LOGS = "requests are not logged, except one line each with --log-requests"
_ALWAYS = "always enabled"
_PLACEMENT = "the supervisor manages process placement"
_WEIGHTS = "weights are memory-mapped and packed while loading"
KERNELS = "the executor selects kernels and sampling methods"
_MAMBA = "recurrent states use the data types of their kernels"
_RANKS = "the executor selects communication between ranks"
_DBO = "dual-batch overlap is not used"
_SLEEP = "sleep mode is not supported; stop the server and restart it with --packed-cache"
_RAY = "use --distributed-executor-backend ray"
_EPLB = "use --eplb-config"
_STRUCTURED = "there is one structured output backend (docs/structured.md)"
_OTLP = "OpenTelemetry is not supported; use `quintet trace`"
_SPECULATION = "use --speculative-config"

ACCEPTED_SWITCHES: dict[str, str] = {
    "enable_lora": "adapters are loaded at start: --lora-modules",
    "async_scheduling": "steps are always scheduled ahead (--max-steps-in-flight)",
    "disable_log_stats": _LOGS,
    "aggregate_engine_logging": _LOGS,
    "enable_log_deltas": _LOGS,
    "disable_uvicorn_access_log": _LOGS,
    "log_error_stack": "the log has the stack trace of every internal error",
    "enable_prompt_tokens_details": _ALWAYS,
    "enable_server_load_tracking": "GET /load is always enabled",
    "enable_request_id_headers": "every response has X-Request-Id",
    "enable_offline_docs": "/docs always works offline",
    "exclude_tools_when_tool_choice_none": "the chat template always receives the request's tools",
    "use_v2_block_manager": "there is only one block manager",
    "disable_async_output_proc": "detokenizer processes always run asynchronously",
    "multi_step_stream_outputs": "every step is streamed",
    "enable_reasoning": "reasoning is parsed if --reasoning-parser is set or detected",
    "disable_frontend_multiprocessing": "frontends are always processes of their own",
    "enable_flashinfer_autotune": KERNELS,
    "enable_bf16x3_router_gemm": KERNELS,
    "use_fp64_gumbel": KERNELS,
    "disable_cascade_attn": KERNELS,
    "disable_custom_all_reduce": _RANKS,
    "disable_nccl_for_dp_synchronization": _RANKS,
    "enable_batch_sharded_sampling": _RANKS,
    "enable_ep_weight_filter": "each rank always reads only its own experts",
    "dcp_q_replicate": _RANKS,
    "numa_bind": _PLACEMENT,
    "ray_workers_use_nsight": _PLACEMENT,
    "use_tqdm_on_load": "loading a large checkpoint always shows a progress bar",
    "calculate_kv_scales": "KV scales are always computed when KV is written",
    "kv_sharing_fast_prefill": "all layers are always computed",
    "disable_hybrid_kv_cache_manager": "sliding-window layers keep only their window",
    "scheduler_reserve_full_isl": "a prompt is admitted when its KV blocks fit",
    **dict.fromkeys((
        "enable_mamba_cache_stochastic_rounding", "enable_mamba_fine_grained_prefix_cache", "use_replayssm",
    ), _MAMBA),
    "enable_cumem_allocator": _WEIGHTS,
    **dict.fromkeys((
        "interleave_mm_strings", "skip_mm_profiling", "disable_mm_preprocessor_cache",
        "disable_chunked_mm_input", "language_model_only", "mm_device_do_normalize",
        "enable_multimodal_encoder_data_parallel",
    ), _MULTIMODAL),
    "enable_flash_late_interaction": "scoring is not supported",
    "enable_mfu_metrics": "see GET /metrics",
    "kv_cache_metrics": "see GET /metrics",
    "cudagraph_metrics": "see GET /metrics",
    "enable_logging_iteration_details": "`quintet trace` shows the phases of each step",
    "enable_layerwise_nvtx_tracing": "`quintet trace` shows the phases of each step",
    "jit_monitor_verbose": _TORCH,
    "fail_on_environ_validation": "VLLM_API_KEY is the only environment variable of vLLM that is read",
    "cohere_is_reasoning_model": "Cohere's API is not served",
    **dict.fromkeys(("enable_dbo", "enable_microbatching"), _DBO),
    **dict.fromkeys(("speculative_disable_mqa_scorer", "disable_logprobs_during_spec_decoding"), _SPECULATION),
    "enable_log_outputs": "outputs are not logged",
    "enable_sleep_mode": _SLEEP,
    "enable_nccl_comm_suspend": _SLEEP,
    "worker_use_ray": _RAY,
    "engine_use_ray": _RAY,
    "eplb_log_balancedness": _EPLB,
    "guided_decoding_disable_fallback": _STRUCTURED,
    "guided_decoding_disable_any_whitespace": _STRUCTURED,
    "guided_decoding_disable_additional_properties": "JSON schemas apply as they are",
}  # fmt: skip
"""Flags without a value that have no effect -> reason."""

ACCEPTED_VALUES: dict[str, str] = {
    "tokenizer_mode": "tokenizer.json is used, and generated if missing",
    "config_format": "config.json is used",
    **dict.fromkeys(("max_loras", "max_cpu_loras"), "all adapters of --lora-modules are used together"),
    "max_lora_rank": "adapters may have any rank",
    "lora_dtype": "adapters have the model's --dtype",
    "response_role": "the response role is always assistant",
    "uvicorn_log_level": "use --log-level, for all processes",
    "log_config_file": "use --log-level, for all processes",
    "disable_access_log_for_endpoints": _LOGS,
    "max_log_len": _LOGS,
    **dict.fromkeys((
        "limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "mm_processor_cache_gb",
        "mm_processor_cache_type", "mm_processor_device", "mm_hasher_algorithm",
        "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "allowed_local_media_path",
        "allowed_media_domains", "video_pruning_rate", "video_pruning_method",
    ), _MULTIMODAL),
    **dict.fromkeys((
        "compilation_config", "optimization_level", "cudagraph_capture_sizes", "cuda_graph_sizes",
        "max_cudagraph_capture_size", "max_seq_len_to_capture", "jit_monitor_mode",
        "max_context_len_to_capture", "cudagraph_mode",
    ), _TORCH),
    **dict.fromkeys((
        "performance_mode", "kernel_config", "attention_config", "moe_backend", "linear_backend", "ir_op_priority",
        "gdn_prefill_backend", "kda_prefill_backend", "override_attention_dtype",
    ), KERNELS),
    "attn_group_size": "layers of one kind share a KV group",
    **dict.fromkeys((
        "mamba_backend", "mamba_ssu_algorithm", "mamba_cache_philox_rounds", "mamba_cache_dtype",
        "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size", "replayssm_buffer_len",
    ), _MAMBA),
    "all2all_backend": _RANKS,
    "dcp_comm_backend": _RANKS,
    "dcp_kv_cache_interleave_size": _RANKS,
    "cp_kv_cache_interleave_size": _RANKS,
    "dp_sync_interval": _RANKS,
    "expert_placement_strategy": _RANKS,
    "distributed_timeout_seconds": "use --stall-timeout and --boot-timeout",
    "cpu_distributed_timeout_seconds": "use --stall-timeout and --boot-timeout",
    **dict.fromkeys((
        "data_parallel_backend", "numa_bind_nodes", "numa_bind_cpus", "worker_cls",
        "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s",
        "dp_supervisor_probe_failure_threshold", "data_parallel_supervisor_port", "tokenizer_pool_type",
        "tokenizer_pool_extra_config",
    ), _PLACEMENT),
    "max_parallel_loading_workers": _WEIGHTS,
    "safetensors_load_strategy": _WEIGHTS,
    "safetensors_prefetch_num_threads": _WEIGHTS,
    "safetensors_prefetch_block_size": _WEIGHTS,
    "model_loader_extra_config": _WEIGHTS,
    "pt_load_map_location": _WEIGHTS,
    "ignore_patterns": "only files of the model are downloaded",
    "prefix_caching_hash_algo": "the hash algorithm is fixed",
    "prefix_match_unit": "prefixes match in whole KV blocks",
    "prefix_cache_retention_interval": "least recently used blocks are evicted first",
    "watermark": "KV blocks of running requests are reserved",
    "prefill_schedule_interval": "prefill and decode share each step",
    "preemption_mode": "the scheduler selects the cheaper of recomputation and swapping (--swap-space)",
    "num_lookahead_slots": "steps are always scheduled ahead (--max-steps-in-flight)",
    "scheduler_delay_factor": "prefill starts as soon as possible",
    "num_scheduler_steps": "steps are always scheduled ahead (--max-steps-in-flight)",
    "guided_decoding_backend": _STRUCTURED,
    "structured_outputs_config": _STRUCTURED,
    "show_hidden_metrics_for_version": "see GET /metrics",
    "kv_cache_metrics_sample": "see GET /metrics",
    "h11_max_incomplete_event_size": "request headers are limited to 64 KiB",
    "h11_max_header_count": "request headers are limited to 64 KiB",
    "fingerprint_mode": "responses have no system_fingerprint",
    "fingerprint_value": "responses have no system_fingerprint",
    "cohere_format": "Cohere's API is not served",
    **dict.fromkeys(("ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"), _DBO),
    **dict.fromkeys(("num_redundant_experts", "eplb_window_size", "eplb_step_interval"), _EPLB),
    "max_num_partial_prefills": "the scheduler splits the tokens of a step among prompts",
    "max_long_partial_prefills": "use --long-prefill-token-threshold",
    **dict.fromkeys((
        "speculative_disable_by_batch_size", "speculative_draft_tensor_parallel_size", "speculative_max_model_len",
        "spec_decoding_acceptance_method", "typical_acceptance_sampler_posterior_threshold",
        "typical_acceptance_sampler_posterior_alpha",
    ), _SPECULATION),
    "tool_parser_plugin": "--tool-call-parser names a parser of Quintet",
    "reasoning_parser_plugin": "--reasoning-parser names a parser of Quintet",
    "stream_interval": "every step is streamed; requests may set stream_interval",
    "kv_offloading_backend": "KV is offloaded to host memory (--kv-offloading-size)",
    "otlp_traces_endpoint": _OTLP,
    "collect_detailed_traces": _OTLP,
}  # fmt: skip
"""Flags with a value that have no effect -> reason."""

_LORA = "adapters of linear layers are supported, by --lora-modules alone"
_ON_HOSTS = "use --nnodes, --node-rank and --master-addr, or run several servers with `quintet route`"
_PLUGIN = "vLLM plugins are not supported"
_OFFLOAD = "weight offloading is not supported; use --quantization or more ranks"

REFUSED_SWITCHES: dict[str, str] = {
    "fully_sharded_loras": _LORA,
    "enable_lora_bias": _LORA,
    "enable_tower_connector_lora": _LORA,
    "specialize_active_lora": _LORA,
    "enable_mixed_moe_lora_format": _LORA,
    "enable_moe_shared_loras": _LORA,
    "enable_prompt_adapter": _LORA,
    "skip_tokenizer_init": "a tokenizer is required; /inference/v1/generate accepts and returns token ids",
    "tokens_only": "all endpoints are served; /inference/v1/generate accepts and returns token ids",
    "disable_sliding_window": "sliding windows cannot be disabled; lower --max-model-len",
    "enable_return_routed_experts": "routed experts are not returned",
    "return_sampling_mask": "sampling masks are not returned",
    "enable_trace_replay": "use --record and `quintet replay`",
    "enable_per_request_metrics": "use GET /metrics, aggregated over requests",
    "enable_ssl_refresh": "restart the server to change the certificate",
    "enable_mm_embeds": _MULTIMODAL,
    "mm_encoder_only": _MULTIMODAL,
    "enable_elastic_ep": "elastic expert parallelism is not supported; `quintet admin` scales processes of other roles",
    "enable_fault_tolerance": "always enabled: the supervisor restarts failed processes",
    "data_parallel_hybrid_lb": _ON_HOSTS,
    "data_parallel_external_lb": _ON_HOSTS,
    "data_parallel_multi_port_external_lb": _ON_HOSTS,
    "allow_deprecated_quantization": "see --quantization for supported formats",
    "grpc": "gRPC is not supported; drop it to serve HTTP",
}
"""Flags without a value that are refused -> alternative."""

REFUSED_VALUES: dict[str, str] = {
    "lora_target_modules": _LORA, "default_mm_loras": _LORA,
    "lora_extra_vocab_size": _LORA, "long_lora_scaling_factors": _LORA, "prompt_adapters": _LORA,
    "max_prompt_adapters": _LORA, "max_prompt_adapter_token": _LORA, "qlora_adapter_name_or_path": _LORA,
    "speculative_model": _SPECULATION, "num_speculative_tokens": _SPECULATION,
    "ngram_prompt_lookup_max": _SPECULATION, "ngram_prompt_lookup_min": _SPECULATION,
    "speculative_model_quantization": _SPECULATION,
    "diffusion_config": "diffusion models are not supported",
    "quantization_param_path": "KV scales are read from the checkpoint",
    "hf_config_path": "put config.json into the model folder, or use --hf-overrides",
    "code_revision": "--revision applies to all files of the model",
    "model_class_overrides": "use --model-impl transformers for unsupported architectures",
    "quantization_config": "the format is read from config.json; --quantization selects load-time quantization",
    "logprobs_mode": "log-probabilities are raw: before penalties and temperature",
    "logits_processors": _PLUGIN, "logits_processor_pattern": _PLUGIN, "io_processor_plugin": _PLUGIN,
    "tool_server": "the client runs tools",
    "scheduler_cls": _PLUGIN, "worker_extension_cls": _PLUGIN, "additional_config": _PLUGIN,
    "device_ids": "set CUDA_VISIBLE_DEVICES in the environment",
    "prefill_context_parallel_size": "use --pipeline-parallel-size or --tensor-parallel-size",
    "data_parallel_rank": _ON_HOSTS, "data_parallel_start_rank": _ON_HOSTS, "data_parallel_size_local": _ON_HOSTS,
    "data_parallel_address": _ON_HOSTS, "data_parallel_rpc_port": _ON_HOSTS,
    "fault_tolerance_config": "the supervisor always restarts failed processes",
    "num_gpu_blocks_override": "use --kv-cache-memory",
    "kv_cache_dtype_skip_layers": "--kv-cache-dtype applies to all layers",
    "ec_transfer_config": _MULTIMODAL, "ec_manager_config": _MULTIMODAL, "mm_encoder_fp8_scale_path": _MULTIMODAL,
    "mm_encoder_fp8_scale_save_path": _MULTIMODAL, "mm_encoder_fp8_scale_save_margin": _MULTIMODAL,
    "offload_backend": _OFFLOAD, "cpu_offload_gb": _OFFLOAD, "cpu_offload_params": _OFFLOAD, "offload_group_size": _OFFLOAD,
    "offload_num_in_group": _OFFLOAD, "offload_prefetch_step": _OFFLOAD, "offload_params": _OFFLOAD,
    "profiler_config": "use `quintet trace`",
    "weight_transfer_config": "weights cannot be updated at run time",
    "max_num_scheduled_tokens": "use --max-num-batched-tokens",
    "ssl_cert_reqs": "use --ssl-ca-certs for client certificates", "ssl_ciphers": "Python's default ciphers are used",
}  # fmt: skip
"""Flags with a value that are refused -> alternative."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Declare vLLM's flags that are not flags of Quintet, hidden in the help."""
    switches = [
        *ACCEPTED_SWITCHES,
        *REFUSED_SWITCHES,
        *(key for key, new in RENAMED.items() if new.is_switch),
    ]
    values = [
        *ACCEPTED_VALUES,
        *REFUSED_VALUES,
        *(key for key, new in RENAMED.items() if not new.is_switch),
        *ROPE,
        *DRAFTS,
        "download_dir",
    ]
    short = {key: word for word, key in SHORT.items()}
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for key in (*switches, *values):
        action: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if key in switches else {}
        parser.add_argument(*([short[key]] if key in short else []), option(key), **action, **hidden)
    parser.add_argument("--hf-token", nargs="?", const=True, **hidden)
    parser.add_argument("-O", dest="optimization_level", **hidden)


def keys() -> set[str]:
    tables = (RENAMED, ACCEPTED_SWITCHES, ACCEPTED_VALUES, REFUSED_SWITCHES, REFUSED_VALUES)
    return {key for table in tables for key in table} | {*ROPE, *DRAFTS, *HUB}
