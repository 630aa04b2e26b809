"""Cross-field rules of settings. Each function validates or derives one value from its arguments alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from quintet.deploy.config.flag import option
from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import format_size
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.spec import KvNeed
from quintet.wire.config import KvFormat
from quintet.wire.errors import ConfigError, RequestError, invalid
from quintet.wire.kv_spec import Kind, KvSpec, LayerKv, group_layers, padded_head
from quintet.wire.model_files import hf_config_path
from quintet.wire.params import SamplingParams

MAX_SOCKET_PATH = 107
"""Maximum length of a Unix socket path on Linux, in bytes (``sun_path`` without the NUL)."""
_LONGEST_SOCKET_NAME = len("/detokenizer-1023.9999999")
_DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens per step that saturate the device; more would only delay decode."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens."""
_CPU_STEP_TARGET_MS = 300
_WHOLE_DEFAULTS = ("top_k", "max_tokens")
"""Integer sampling defaults; generation configs may contain 50.0."""
_DEFAULT_SWAP_BYTES = 4 << 30
_SCALE_BYTES = 4
"""Bytes of the scale of each int8 key or value of a head."""
_FOUR_GROUP, _FACTOR_BYTES = 32, 4
"""Group size of an int4 KV cache, and bytes of scale and zero point per group."""
_LEAST = {
    -1: ("max_logprobs",),
    0: (
        *("drain_timeout", "keep_alive_interval", "long_prefill_token_threshold", "max_restarts"),
        *("node_rank", "port", "response_store_entries", "step_ms", "step_target_ms", "stream_grace"),
        "threads",
    ),
    1: (
        *("block_size", "data_parallel_size", "decode_context_parallel_size", "detokenizers", "frontends"),
        *("max_num_batched_tokens", "max_num_seqs", "max_queued_requests", "max_queued_tokens"),
        *("max_steps_in_flight", "nnodes", "pipeline_parallel_size", "tensor_parallel_size", "tokenizers"),
    ),
    2: ("max_model_len",),
    4: ("record_mb",),
}
"""Smallest value -> flags; None is allowed too."""
_MOST = {512: ("data_parallel_size", "detokenizers", "frontends", "tokenizers"), 65535: ("port",)}
"""Largest value -> flags."""
_POSITIVE = ("boot_timeout", "stall_timeout", "write_timeout", "header_timeout", "response_store_hours")
"""Flags above 0."""


def check_ranges(options: Options) -> None:
    """Validate ranges of numbers. Raises `ConfigError` with flag, value and range."""
    for least, key in ((least, key) for least, keys in _LEAST.items() for key in keys):
        value = getattr(options, key)
        if value is not None and not value >= least:
            raise ConfigError(f"{option(key)} is {value}; it must be at least {least}")
    for key in _POSITIVE:
        value, unit = getattr(options, key), "" if key.endswith("hours") else " seconds"
        if not value > 0:
            raise ConfigError(f"{option(key)} is {value}; it must be more than 0{unit}")
    for most, key in ((most, key) for most, keys in _MOST.items() for key in keys):
        value = getattr(options, key)
        if value > most:
            raise ConfigError(f"{option(key)} is {value}; it must be at most {most}")
    for key, most_share in (("kv_cache_memory_share", 0.95), ("gpu_memory_utilization", 1.0)):
        share = getattr(options, key)
        if share is not None and not 0 < share <= most_share:
            raise ConfigError(f"{option(key)} is {share}; it must be above 0 and at most {most_share:g}")


def check_mock_only_flags(options: Options) -> None:
    """Reject ``--step-ms`` and ``--mock-script`` without the mock executor, which alone uses them."""
    for flag, value in (("--step-ms", options.step_ms), ("--mock-script", options.mock_script)):
        if value and options.executor != "mock":
            raise ConfigError(f"{flag} {value} requires --executor mock: add it, or drop {flag}")


def check_device_flags(options: Options, device: str) -> None:
    """Reject flags of the other kind of device. ``--batch-invariant`` and ``--enforce-eager`` change nothing on a CPU."""
    if device == "cpu" and options.attention_backend != "auto":
        raise ConfigError(
            f"--attention-backend {options.attention_backend} is for GPUs, but the model runs on the CPU: drop it, or set "
            "--device cuda"
        )
    for flag, is_given in (
        ("--packed-cache", options.packed_cache is not None),
        (f"--activation-dtype {options.activation_dtype}", options.activation_dtype != "auto"),
        ("--decode-context-parallel-size", options.decode_context_parallel_size > 1),
        ("--pipeline-parallel-size", options.pipeline_parallel_size > 1),
        ("--enable-expert-parallel", options.enable_expert_parallel),
        ("--nnodes", options.nnodes > 1),
    ):
        if device != "cpu" and is_given:
            raise ConfigError(f"{flag} is supported on CPUs only: add --device cpu or drop it")


def check_prompt_embeds(options: Options, facts: ModelFacts) -> None:
    """Reject prompt embeddings for models that transformers implements."""
    if options.enable_prompt_embeds and facts.implementation == "transformers":
        raise ConfigError(
            f"--enable-prompt-embeds requires Quintet's model implementation, but {facts.architecture} uses transformers: drop "
            "the flag"
        )


def check_expert_widths(facts: ModelFacts, device: str, dtype_bytes: int) -> None:
    """Reject experts with a row size that is not a multiple of 16 bytes, which GPU kernels require."""
    decoder = facts.decoder
    if device != "cuda" or decoder is None:
        return
    widths = {layer.mlp.width for layer in decoder.layers if isinstance(layer.mlp, ExpertsSpec)}
    depths = widths | {decoder.hidden_size} if widths else widths
    odd = sorted(depth for depth in depths if depth * dtype_bytes % 16)
    if odd:
        raise ConfigError(
            f"{hf_config_path(facts.path)}: experts have rows of {odd[0]} numbers, but GPU kernels require multiples of"
            f" {16 // dtype_bytes}: set --device cpu, or --model-impl transformers"
        )


def kv_spec(options: Options, device: str, facts: ModelFacts, dtype_bytes: int) -> KvSpec:
    """Return the KV layout. Raises `ConfigError` for a data type that the device does not support."""
    block_size, kind = options.block_size, kv_format(options, device, facts)
    if device != "cpu" and kind not in ("model", "fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {kind} is not supported on this device: set fp8, or --device cpu"
        )
    if device == "cpu" and kind != "model" and block_size is not None and block_size % 16:
        raise ConfigError(
            f"--block-size is {block_size}, but --kv-cache-dtype {kind} requires a multiple of 16: set 16 or 32, or"
            " --kv-cache-dtype model"
        )
    if kind == "int4" and any(need is not None and need.values_in_keys for need in facts.kv_needs):
        raise ConfigError(
            "--kv-cache-dtype int4 is not supported for latent attention (MLA), which this model uses: set int8"
        )
    head_bytes: dict[KvFormat, Callable[[int], int]] = {
        "model": lambda width: width * dtype_bytes,
        "fp8": lambda width: width,
        "int8": lambda width: width + _SCALE_BYTES,
        "int4": lambda width: width // 2 + -(-width // _FOUR_GROUP) * _FACTOR_BYTES,
    }
    return _groups(facts, block_size, dtype_bytes, head_bytes[kind])


def kv_format(options: Options, device: str, facts: ModelFacts) -> KvFormat:
    """Return the KV data type: the flag's, else the checkpoint's, else the model's."""
    match options.kv_cache_dtype:
        case "auto":
            return (facts.stored_kv_format and facts.stored_kv_format.format_on(device)) or "model"
        case "int8" | "int4" | "fp8" as narrow:
            return narrow
        case _:
            return "model"


def kv_formats(options: Options, device: str, facts: ModelFacts, dtype_bytes: int) -> dict[KvFormat, KvSpec]:
    """Return the KV layout for each supported data type."""
    found: dict[KvFormat, KvSpec] = {}
    for name in get_args(KvFormat):
        if facts.implementation == "transformers" and name != "model":
            continue
        try:
            found[name] = kv_spec(
                dataclasses.replace(options, kv_cache_dtype=name), device, facts, dtype_bytes
            )
        except ConfigError:
            continue  # not supported by this device or model
    return found


def _groups(
    facts: ModelFacts, block_size: int | None, dtype_bytes: int, head_bytes: Callable[[int], int]
) -> KvSpec:
    """Group the layers by KV kind.

    dtype_bytes: size of a number of the model. head_bytes: maps the padded width of a cached key or value to its bytes.
    All layers have the same block size in bytes. Without ``block_size``, a block has enough tokens that keys and values of an
    attention layer fill the size of the largest recurrent state.
    """
    layers = []
    for layer, need in enumerate(facts.kv_needs):
        if need is not None:
            widths = (need.key_dim,) if need.values_in_keys else (need.key_dim, need.value_dim)
            token_bytes = need.num_kv_heads * sum(head_bytes(padded_head(width)) for width in widths)
            layers.append(LayerKv(layer, *_visible_tokens(need, facts.spec.reach), token_bytes))
    for layer, state in enumerate(facts.state_needs):
        if state is not None:
            layers.append(LayerKv(layer, "state", state_bytes=state.num_bytes(dtype_bytes)))
    most = max(layer.token_bytes for layer in layers)
    filling = max(layer.state_bytes for layer in layers) // most if most else 0
    return group_layers(layers, block_size or max(DEFAULT_BLOCK_SIZE, filling // 16 * 16), facts.stages)


def _visible_tokens(need: KvNeed, max_model_len: int) -> tuple[Kind, int]:
    """Return the attention kind of a layer and its window. A window of at least ``max_model_len`` is full attention."""
    if need.chunk is not None and need.chunk < max_model_len:
        return "chunked", need.chunk
    if need.window is not None and need.window < max_model_len:
        return "sliding", need.window
    return "full", 0


def most_step_tokens(options: Options, device: str, max_model_len: int) -> int:
    """Return the maximum number of tokens of one request in a step."""
    if options.max_num_batched_tokens is not None:
        return options.max_num_batched_tokens
    whole = 0 if options.enable_chunked_prefill else max_model_len
    return max(_DEFAULT_BATCHED_TOKENS[device], options.max_num_seqs, whole)


def derive_max_num_batched_tokens(options: Options, device: str, max_model_len: int) -> int:
    """Return the step's token budget.

    It must hold one token of every running request, and without chunked prefill a whole prompt.
    """
    requested = options.max_num_batched_tokens
    needed = (
        options.max_num_seqs if options.enable_chunked_prefill else max(options.max_num_seqs, max_model_len)
    )
    if requested is None:
        return most_step_tokens(options, device, max_model_len)
    if requested < options.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {requested}, less than --max-num-seqs {options.max_num_seqs}: "
            f"each running request needs one token per step; raise it, or lower --max-num-seqs to {requested}"
        )
    if requested < needed:
        raise ConfigError(
            f"--max-num-batched-tokens is {requested}, but without chunked prefill a prompt of up to "
            f"{max_model_len} tokens runs in one step: raise it, lower --max-model-len, or enable chunked prefill"
        )
    return requested


def derive_step_target_ms(options: Options, kind: str, device: str) -> int:
    """Return the step latency target: by default only on a CPU, where a full step would stall streams for seconds."""
    if options.step_target_ms is not None:
        return options.step_target_ms
    return _CPU_STEP_TARGET_MS if kind == "torch" and device == "cpu" else 0


def derive_max_model_len(requested: int | None, of_model: int, config_path: Path) -> int:
    """Return the maximum context length: the model's, or the shorter requested one."""
    if requested is None:
        return of_model
    if requested > of_model:
        raise ConfigError(
            f"--max-model-len is {requested}, but the model's context length is {of_model} tokens ({config_path}); "
            f"set at most {of_model}, or add RoPE scaling to config.json"
        )
    return requested


def fit_max_model_len(
    kv: KvSpec,
    memory_bytes: int,
    max_model_len: int,
    step_tokens: int,
    requested: bool,
    memory_flag_given: bool,
    num_copies: int,
) -> int:
    """Return the maximum context length with KV that fits into memory.

    A default length is reduced to fit. A requested length that does not fit raises `ConfigError` with the largest one that
    does. step_tokens: maximum number of tokens of one request in a step. num_copies: KV caches that divide the flag's memory.
    """
    fitting = kv.longest(kv.num_blocks(memory_bytes), max_model_len, step_tokens)
    if fitting >= max_model_len:
        return max_model_len
    needed_bytes = kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
    if fitting < 2 * kv.block_size or requested:
        more = f"--kv-cache-memory {-(-needed_bytes * num_copies >> 20)}MiB"
        more += "" if memory_flag_given else " or a larger --kv-cache-memory-share"
        less = f"lower --max-model-len to {fitting}, or " if fitting >= 2 * kv.block_size else ""
        raise ConfigError(
            f"one request of {max_model_len} tokens needs {format_size(needed_bytes)} of KV cache, but"
            f" {format_size(memory_bytes)} is available: {less}set {more}"
        )
    return fitting


def cap_kv_memory(
    kv: KvSpec, memory_bytes: int, max_num_seqs: int, max_model_len: int, step_tokens: int
) -> int:
    """Cap KV memory at what ``max_num_seqs`` sequences of maximum length use, plus one block. 0 (unknown) stays 0."""
    blocks_per_sequence = kv.most_blocks(max_model_len, step_tokens)
    return min(memory_bytes, (max_num_seqs * blocks_per_sequence + 1) * kv.bytes_per_block)


def derive_swap_bytes(swap_gib: float | None, device: str, kind: str, available_bytes: int) -> int:
    """Return the swap space for KV of preempted requests; 0 by default on a CPU, where KV is already in host memory."""
    if swap_gib is None:
        return min(_DEFAULT_SWAP_BYTES, available_bytes // 4) if device == "cuda" else 0
    swap_bytes = int(swap_gib * (1 << 30))
    if swap_bytes < 0:
        raise ConfigError(f"--swap-space is {swap_gib:g}; it must be at least 0 GiB")
    if swap_bytes and kind == "mock":
        raise ConfigError(
            f"--swap-space {swap_gib:g}: the mock executor has no KV cache to swap; drop the flag"
        )
    if swap_bytes > available_bytes:
        raise ConfigError(
            f"--swap-space is {swap_gib:g} GiB, but {format_size(available_bytes)} of memory is free; lower it"
        )
    return swap_bytes


def fit_facts(facts: ModelFacts, max_model_len: int) -> tuple[ModelFacts, list[str]]:
    """Remove end-of-sequence ids outside the vocabulary and invalid sampling defaults; return the facts and a note for each.

    Any of them would make every request fail.
    """
    notes: list[str] = []
    known = [token_id for token_id in facts.eos_token_ids if 0 <= token_id < facts.spec.vocab_size]
    if len(known) < len(facts.eos_token_ids):
        unknown = ", ".join(str(token_id) for token_id in facts.eos_token_ids if token_id not in known)
        left = f"{known} end a response" if known else "only max_tokens and stop strings end a response"
        notes.append(
            f"eos_token_id {unknown} of {facts.path} is ignored: the vocabulary has {facts.spec.vocab_size} tokens; {left}"
        )
    defaults: dict[str, float | int] = {}
    for name, value in facts.generation_defaults.items():
        try:
            defaults[name] = _usable_default(name, value, max_model_len)
        except RequestError as error:
            notes.append(f"a sampling default of the generation config is ignored: {error.message}")
    return dataclasses.replace(facts, eos_token_ids=known, generation_defaults=defaults), notes


def _usable_default(name: str, value: float, max_model_len: int) -> float | int:
    """Return a sampling default in the form of request parameters. Raises `RequestError` if it is invalid."""
    if name in _WHOLE_DEFAULTS:
        if isinstance(value, float) and not value.is_integer():
            raise invalid(f"{name} is {value:g}; it must be an integer.", name)
        value = int(value)
    if name == "max_tokens":
        value = min(value, max_model_len - 1)
    SamplingParams(**{name: value}).checked()  # type: ignore[arg-type]
    return value


def check_run_dir_length(run_dir: Path) -> None:
    """Reject a run folder if its socket paths would exceed `MAX_SOCKET_PATH`."""
    longest = len(bytes(run_dir)) + _LONGEST_SOCKET_NAME
    if longest > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket paths in {run_dir} would have {longest} bytes, but the system allows {MAX_SOCKET_PATH}: "
            "set TMPDIR to a shorter folder, e.g. TMPDIR=/tmp"
        )


def advise_open_server(host: str, has_api_key: bool) -> str | None:
    """Return a warning when the server is reachable from the network without authentication."""
    if has_api_key or host in ("127.0.0.1", "localhost", "::1"):
        return None
    return f"no authentication: any client that can reach {host} has access; set --api-key"
