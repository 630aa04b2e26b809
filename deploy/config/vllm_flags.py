"""Command lines written for vLLM: what becomes of each of its flags that is not one of Quintet's own.

A flag is *renamed* (Quintet has it under another name), *accepted* (it has no meaning here; a line of the log says why), or
*refused* with what to use instead. docs/vllm-flags.md shows the tables below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.deploy.config.flag_values import json_object
from quintet.wire.errors import ConfigError

Settings = dict[str, object]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag that Quintet has under another name."""

    ours: str
    is_switch: bool = False
    convert: Callable[[object], object] | None = None
    """From its value to that of ours."""


def _not(value: object) -> object:
    return not value


SHORT = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size", "-ep": "enable_expert_parallel", "-q": "quantization", "-n": "nnodes",
    "-r": "node_rank", "-asc": "api_server_count",
}  # fmt: skip
"""Short spellings of flags that Quintet takes."""

TAKEN = (
    "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "api_key", "attention_backend", "block_size",
    "chat_template", "data_parallel_size", "decode_context_parallel_size", "default_chat_template_kwargs",
    "distributed_executor_backend", "dtype", "enable_auto_tool_choice", "enable_chunked_prefill", "enable_eplb",
    "enable_expert_parallel", "enable_force_include_usage", "enable_prefix_caching", "enable_prompt_embeds",
    "enable_tokenizer_info_endpoint", "enforce_eager", "eplb_config", "generation_config", "gpu_memory_utilization", "headless",
    "hf_overrides", "host", "kv_cache_dtype", "kv_events_config", "load_format", "long_prefill_token_threshold", "master_addr",
    "master_port", "max_logprobs", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "middleware", "model_impl",
    "nnodes", "node_rank", "override_generation_config", "pipeline_parallel_size", "port", "quantization", "reasoning_parser",
    "return_tokens_as_token_ids", "revision", "root_path", "scheduling_policy", "seed", "served_model_name", "ssl_ca_certs",
    "ssl_certfile", "ssl_keyfile", "swap_space", "tensor_parallel_size", "tokenizer", "tokenizer_revision", "tool_call_parser",
    "trust_remote_code", "trust_request_chat_template", "uds",
)  # fmt: skip
"""Flags that both have, under one name."""

RENAMED: dict[str, Renamed] = {
    "kv_cache_memory_bytes": Renamed("kv_cache_memory"),
    "sse_keep_alive_interval": Renamed("keep_alive_interval"),
    "api_server_count": Renamed("frontends"),
    "renderer_num_workers": Renamed("tokenizers"),
    "tokenizer_pool_size": Renamed("tokenizers"),
    "max_num_queued_reqs": Renamed("max_queued_requests"),
    "max_num_queued_tokens": Renamed("max_queued_tokens"),
    "shutdown_timeout": Renamed("drain_timeout"),
    "enable_log_requests": Renamed("log_requests", is_switch=True),
    "disable_log_requests": Renamed("log_requests", is_switch=True, convert=_not),
}
"""By the key of vLLM's flag."""

ROPE = ("rope_scaling", "rope_theta")
"""Flags of older versions for what ``--hf-overrides`` says."""

_MEDIA = "models read text alone here"
_TORCH = "nothing is compiled by torch here"
_LOGS = "requests and prompts are not logged, but for one line with --log-requests"
_ALWAYS = "it is always so"
_PLACES = "the supervisor places processes itself"
_WEIGHTS = "weights are mapped, and packed as they are read"
_DRAWS = "drawing and kernels are chosen by the executor"
_MAMBA = "states of layers are kept in the formats of their kernels"
_SPLIT = "how ranks talk to each other is chosen by the executor"

ACCEPTED_SWITCHES: dict[str, str] = {
    "async_scheduling": "steps are always planned ahead (--depth)",
    "disable_log_stats": _LOGS,
    "aggregate_engine_logging": _LOGS,
    "enable_log_deltas": _LOGS,
    "disable_uvicorn_access_log": _LOGS,
    "log_error_stack": "the log has the stack of every error of the server",
    "enable_prompt_tokens_details": _ALWAYS,
    "enable_server_load_tracking": "GET /load always tells",
    "enable_request_id_headers": "every answer has X-Request-Id",
    "enable_offline_docs": "/docs needs no network",
    "exclude_tools_when_tool_choice_none": "the chat template is shown the tools that the request has",
    "use_v2_block_manager": "there is one",
    "disable_async_output_proc": "text is made by processes of their own",
    "multi_step_stream_outputs": "every step is told",
    "enable_flashinfer_autotune": _DRAWS,
    "enable_bf16x3_router_gemm": _DRAWS,
    "use_fp64_gumbel": _DRAWS,
    "disable_cascade_attn": _DRAWS,
    "disable_custom_all_reduce": _SPLIT,
    "disable_nccl_for_dp_synchronization": _SPLIT,
    "enable_batch_sharded_sampling": _SPLIT,
    "enable_ep_weight_filter": "ranks read their own experts alone",
    "dcp_q_replicate": _SPLIT,
    "numa_bind": _PLACES,
    "ray_workers_use_nsight": _PLACES,
    "use_tqdm_on_load": "large checkpoints have a bar",
    "calculate_kv_scales": "scales of keys and values are computed as they are written",
    "kv_sharing_fast_prefill": "all layers are computed",
    "disable_hybrid_kv_cache_manager": "layers that see a window keep a window",
    "scheduler_reserve_full_isl": "a prompt is admitted when its blocks fit",
    "enable_mamba_cache_stochastic_rounding": _MAMBA,
    "use_replayssm": _MAMBA,
    "enable_cumem_allocator": _WEIGHTS,
    "interleave_mm_strings": _MEDIA,
    "skip_mm_profiling": _MEDIA,
    "disable_mm_preprocessor_cache": _MEDIA,
    "disable_chunked_mm_input": _MEDIA,
    "language_model_only": _MEDIA,
    "mm_device_do_normalize": _MEDIA,
    "enable_flash_late_interaction": "scores are not computed here",
    "enable_mfu_metrics": "GET /metrics has the figures that there are",
    "kv_cache_metrics": "GET /metrics has the figures that there are",
    "cudagraph_metrics": "GET /metrics has the figures that there are",
    "enable_logging_iteration_details": "`quintet trace` shows what steps are made of",
    "enable_layerwise_nvtx_tracing": "`quintet trace` shows what steps are made of",
    "jit_monitor_verbose": _TORCH,
    "fail_on_environ_validation": "variables of vLLM's are not read",
    "cohere_is_reasoning_model": "Cohere's API is not served",
}
"""Flags without a value that have no meaning here, and why."""

ACCEPTED_VALUES: dict[str, str] = {
    "tokenizer_mode": "tokenizer.json is read, and made where there is none",
    "config_format": "config.json is read",
    "response_role": "the answer's role is assistant",
    "uvicorn_log_level": "--log-level is for all processes",
    "log_config_file": "--log-level is for all processes",
    "disable_access_log_for_endpoints": _LOGS,
    "max_log_len": _LOGS,
    "limit_mm_per_prompt": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "mm_processor_cache_gb": _MEDIA,
    "mm_processor_cache_type": _MEDIA,
    "mm_processor_device": _MEDIA,
    "mm_hasher_algorithm": _MEDIA,
    "mm_shm_cache_max_object_size_mb": _MEDIA,
    "mm_encoder_tp_mode": _MEDIA,
    "mm_encoder_attn_backend": _MEDIA,
    "mm_encoder_attn_dtype": _MEDIA,
    "mm_tensor_ipc": _MEDIA,
    "mm_ipc_gpu_memory_gb": _MEDIA,
    "allowed_local_media_path": _MEDIA,
    "allowed_media_domains": _MEDIA,
    "video_pruning_rate": _MEDIA,
    "video_pruning_method": _MEDIA,
    "compilation_config": _TORCH,
    "optimization_level": _TORCH,
    "performance_mode": _DRAWS,
    "cudagraph_capture_sizes": _TORCH,
    "max_cudagraph_capture_size": _TORCH,
    "max_seq_len_to_capture": _TORCH,
    "jit_monitor_mode": _TORCH,
    "kernel_config": _DRAWS,
    "attention_config": _DRAWS,
    "moe_backend": _DRAWS,
    "linear_backend": _DRAWS,
    "ir_op_priority": _DRAWS,
    "gdn_prefill_backend": _DRAWS,
    "kda_prefill_backend": _DRAWS,
    "mamba_backend": _MAMBA,
    "mamba_ssu_algorithm": _MAMBA,
    "mamba_cache_philox_rounds": _MAMBA,
    "mamba_cache_dtype": _MAMBA,
    "mamba_ssm_cache_dtype": _MAMBA,
    "mamba_cache_mode": _MAMBA,
    "mamba_block_size": _MAMBA,
    "replayssm_buffer_len": _MAMBA,
    "all2all_backend": _SPLIT,
    "dcp_comm_backend": _SPLIT,
    "dcp_kv_cache_interleave_size": _SPLIT,
    "cp_kv_cache_interleave_size": _SPLIT,
    "dp_sync_interval": _SPLIT,
    "expert_placement_strategy": _SPLIT,
    "distributed_timeout_seconds": "--stall-timeout and --boot-timeout are for all processes",
    "cpu_distributed_timeout_seconds": "--stall-timeout and --boot-timeout are for all processes",
    "data_parallel_backend": _PLACES,
    "numa_bind_nodes": _PLACES,
    "numa_bind_cpus": _PLACES,
    "max_parallel_loading_workers": _WEIGHTS,
    "safetensors_load_strategy": _WEIGHTS,
    "safetensors_prefetch_num_threads": _WEIGHTS,
    "safetensors_prefetch_block_size": _WEIGHTS,
    "model_loader_extra_config": _WEIGHTS,
    "pt_load_map_location": _WEIGHTS,
    "ignore_patterns": "files of the model itself are fetched alone",
    "prefix_caching_hash_algo": "blocks are found by hashes of their tokens",
    "prefix_match_unit": "prefixes match in whole blocks",
    "prefix_cache_retention_interval": "least recently used blocks are evicted first",
    "watermark": "blocks that running requests need are kept for them",
    "prefill_schedule_interval": "prompts and outputs share each step",
    "preemption_mode": "what is cheaper is taken: to compute again, or to copy back (--swap-space)",
    "num_lookahead_slots": "steps are always planned ahead (--depth)",
    "scheduler_delay_factor": "a prompt begins when it can",
    "num_scheduler_steps": "steps are always planned ahead (--depth)",
    "guided_decoding_backend": "one library enforces forms (docs/structured.md)",
    "structured_outputs_config": "one library enforces forms (docs/structured.md)",
    "show_hidden_metrics_for_version": "GET /metrics has the figures that there are",
    "kv_cache_metrics_sample": "GET /metrics has the figures that there are",
    "h11_max_incomplete_event_size": "the head of a request may have 64 KiB",
    "h11_max_header_count": "the head of a request may have 64 KiB",
    "fingerprint_mode": "answers have no fingerprint",
    "fingerprint_value": "answers have no fingerprint",
    "cohere_format": "Cohere's API is not served",
    "worker_cls": _PLACES,
    "dp_supervisor_probe_interval_s": _PLACES,
    "dp_supervisor_probe_timeout_s": _PLACES,
    "dp_supervisor_probe_failure_threshold": _PLACES,
    "data_parallel_supervisor_port": _PLACES,
    "tokenizer_pool_type": _PLACES,
    "tokenizer_pool_extra_config": _PLACES,
}
"""Flags with a value that have no meaning here, and why."""

_ADAPTERS = "adapters are not there: merge them into the weights"
_DRAFTS = "speculation is not there"
_POOLING = "embeddings, scores and rankings are not there"
_ON_HOSTS = "name hosts by --nnodes, --node-rank and --master-addr, or put servers behind `quintet route`"
_PLUGIN = "plugins of vLLM's are not loaded"
_OFFLOAD = "weights stay in memory: take fewer bits (--quantization), or more ranks"

REFUSED_SWITCHES: dict[str, str] = {
    "enable_lora": _ADAPTERS,
    "fully_sharded_loras": _ADAPTERS,
    "enable_lora_bias": _ADAPTERS,
    "enable_tower_connector_lora": _ADAPTERS,
    "specialize_active_lora": _ADAPTERS,
    "enable_mixed_moe_lora_format": _ADAPTERS,
    "enable_moe_shared_loras": _ADAPTERS,
    "enable_prompt_adapter": _ADAPTERS,
    "enable_sleep_mode": "a server that sleeps is not there: end it, and start it with --packed-cache",
    "enable_nccl_comm_suspend": "a server that sleeps is not there",
    "skip_tokenizer_init": "a tokenizer is needed; /inference/v1/generate takes and gives ids",
    "tokens_only": "all endpoints are served; /inference/v1/generate takes and gives ids",
    "disable_sliding_window": "layers see the window that they were trained with: lower --max-model-len",
    "enable_return_routed_experts": "which experts were asked is not told",
    "return_sampling_mask": "which tokens could be drawn is not told",
    "enable_trace_replay": "--record and `quintet replay` are for that",
    "enable_per_request_metrics": "GET /metrics has them for all requests",
    "per_request_spec_decode_metrics": _DRAFTS,
    "enable_log_outputs": "outputs are not logged",
    "disable_fastapi_docs": "/docs and /openapi.json are open: close them in the proxy",
    "enable_ssl_refresh": "restart the server for another certificate",
    "enable_mm_embeds": _MEDIA,
    "mm_encoder_only": _MEDIA,
    "enable_dbo": "steps are not cut into two",
    "enable_elastic_ep": "`quintet admin` adds and takes away processes of other roles",
    "enable_fault_tolerance": "processes that die are replaced always",
    "data_parallel_hybrid_lb": _ON_HOSTS,
    "data_parallel_external_lb": _ON_HOSTS,
    "data_parallel_multi_port_external_lb": _ON_HOSTS,
    "allow_deprecated_quantization": "--quantization names what there is",
}
"""Flags without a value that are refused, and what to use instead."""

REFUSED_VALUES: dict[str, str] = {
    "lora_modules": _ADAPTERS, "max_loras": _ADAPTERS, "max_lora_rank": _ADAPTERS, "max_cpu_loras": _ADAPTERS,
    "lora_dtype": _ADAPTERS, "lora_target_modules": _ADAPTERS, "default_mm_loras": _ADAPTERS,
    "lora_extra_vocab_size": _ADAPTERS, "long_lora_scaling_factors": _ADAPTERS, "prompt_adapters": _ADAPTERS,
    "max_prompt_adapters": _ADAPTERS, "max_prompt_adapter_token": _ADAPTERS, "qlora_adapter_name_or_path": _ADAPTERS,
    "speculative_config": _DRAFTS, "speculative_model": _DRAFTS, "num_speculative_tokens": _DRAFTS,
    "ngram_prompt_lookup_max": _DRAFTS, "ngram_prompt_lookup_min": _DRAFTS, "spec_method": _DRAFTS, "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS, "diffusion_config": "models that write in blocks are not there",
    "runner": _POOLING, "convert": _POOLING, "task": _POOLING, "pooler_config": _POOLING, "override_pooler_config": _POOLING,
    "hf_token": "set HF_TOKEN in the environment: command lines can be read by others",
    "hf_config_path": "put config.json into the model's folder, or use --hf-overrides",
    "code_revision": "--revision is for all files of the model",
    "download_dir": "set HF_HOME in the environment",
    "model_class_overrides": "--model-impl transformers computes models that Quintet has no layers for",
    "quantization_config": "config.json says how a checkpoint is quantized; --quantization says what to make of it",
    "logprobs_mode": "log-probabilities are the model's own, before penalties and temperature",
    "logits_processors": _PLUGIN, "logits_processor_pattern": _PLUGIN, "io_processor_plugin": _PLUGIN,
    "tool_parser_plugin": _PLUGIN, "reasoning_parser_plugin": _PLUGIN, "tool_server": "tools are run by the client",
    "scheduler_cls": _PLUGIN, "worker_extension_cls": _PLUGIN, "additional_config": _PLUGIN,
    "reasoning_config": "--reasoning-parser names how reasoning is read",
    "device_ids": "set CUDA_VISIBLE_DEVICES in the environment",
    "prefill_context_parallel_size": "prompts are divided by layers and heads: --pipeline-parallel-size, --tensor-parallel-size",
    "data_parallel_rank": _ON_HOSTS, "data_parallel_start_rank": _ON_HOSTS, "data_parallel_size_local": _ON_HOSTS,
    "data_parallel_address": _ON_HOSTS, "data_parallel_rpc_port": _ON_HOSTS,
    "ubatch_size": "steps are not cut into two", "dbo_decode_token_threshold": "steps are not cut into two",
    "dbo_prefill_token_threshold": "steps are not cut into two",
    "fault_tolerance_config": "processes that die are replaced always",
    "num_gpu_blocks_override": "--kv-cache-memory says how much memory blocks have",
    "kv_cache_dtype_skip_layers": "--kv-cache-dtype is for all layers",
    "kv_offloading_size": "--swap-space keeps blocks in memory, --kv-disk on disk",
    "kv_offloading_backend": "--swap-space keeps blocks in memory, --kv-disk on disk",
    "kv_transfer_config": "--role, --kv-peers and --kv-store are for that",
    "ec_transfer_config": _MEDIA, "ec_manager_config": _MEDIA, "mm_encoder_fp8_scale_path": _MEDIA,
    "mm_encoder_fp8_scale_save_path": _MEDIA, "mm_encoder_fp8_scale_save_margin": _MEDIA,
    "offload_backend": _OFFLOAD, "cpu_offload_gb": _OFFLOAD, "cpu_offload_params": _OFFLOAD, "offload_group_size": _OFFLOAD,
    "offload_num_in_group": _OFFLOAD, "offload_prefetch_step": _OFFLOAD, "offload_params": _OFFLOAD,
    "otlp_traces_endpoint": "traces are not sent: `quintet trace` shows where the time of a step went",
    "collect_detailed_traces": "traces are not sent: `quintet trace` shows where the time of a step went",
    "profiler_config": "`quintet trace` shows where the time of a step went",
    "weight_transfer_config": "weights are read once",
    "max_num_scheduled_tokens": "--max-num-batched-tokens is for that",
    "stream_interval": "requests say it for themselves: stream_interval",
    "ssl_cert_reqs": "--ssl-ca-certs asks clients for certificates", "ssl_ciphers": "those of Python are taken",
}  # fmt: skip
"""Flags with a value that are refused, and what to use instead."""

_HARMLESS = {"", "0", "0.0", "1", "1.0", "none", "auto", "false", "[]", "{}"}
"""Values that say what is so anyway."""


def option(key: str) -> str:
    """Return a flag as it is written."""
    return "--" + key.replace("_", "-")


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Declare flags of vLLM's that are not Quintet's, without showing them in the help."""
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
    ]
    short = {key: word for word, key in SHORT.items()}
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for key in switches:
        parser.add_argument(option(key), action=argparse.BooleanOptionalAction, **hidden)
    for key in values:
        parser.add_argument(*([short[key]] if key in short else []), option(key), **hidden)
    parser.add_argument("-O", dest="optimization_level", **hidden)


def keys() -> set[str]:
    """Return the keys of all of these flags."""
    tables = (RENAMED, ACCEPTED_SWITCHES, ACCEPTED_VALUES, REFUSED_SWITCHES, REFUSED_VALUES)
    return {key for table in tables for key in table} | set(ROPE)


def translated(settings: Mapping[str, object], source: str) -> tuple[Settings, list[str]]:
    """Return settings in Quintet's own words, and a line for each that has no meaning. Raises `ConfigError` for refused ones."""
    found: Settings = {}
    notes: list[str] = []
    for raw_key, value in settings.items():
        key = str(raw_key).replace("-", "_")
        accepted = ACCEPTED_SWITCHES.get(key) or ACCEPTED_VALUES.get(key)
        refused = REFUSED_SWITCHES.get(key) or REFUSED_VALUES.get(key)
        if key in RENAMED:
            new = RENAMED[key]
            found[new.ours] = value if new.convert is None else new.convert(value)
        elif key in ROPE:
            said = json_object(value, option(key)) if key == "rope_scaling" else _number(value, key)
            given = json_object(found.get("hf_overrides", settings.get("hf_overrides", {})), "--hf-overrides")
            found["hf_overrides"] = given | {key: said}
        elif accepted is not None:
            notes.append(f"{option(key)} has no meaning here: {accepted}")
        elif refused is None:
            if key not in found:
                found[str(raw_key)] = value
        elif not _says_nothing(value):
            raise ConfigError(f"{source}: {option(key)} of vLLM's is not taken: {refused}")
    return found, notes


def _says_nothing(value: object) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.strip().lower() in _HARMLESS


def _number(value: object, key: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"{option(key)} is {value!r}; it must be a number") from None
