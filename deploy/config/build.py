"""Resolve flags, model files and machine into one frozen `EngineConfig`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quintet.deploy import embedded
from quintet.deploy.config import network, ranks, rules
from quintet.deploy.config.device import default_device
from quintet.deploy.config.draft import DraftFacts, read_draft
from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.events import kv_events_config
from quintet.deploy.config.kv.peers import kv_peers_config
from quintet.deploy.config.kv.storage import kv_disk_config, kv_store_config
from quintet.deploy.config.kv.transfer import KvSource, notes_on_transfer, with_kv_transfer_config
from quintet.deploy.config.memory import (
    ATTENTION_SCRATCH_BYTES,
    available_ram_bytes,
    default_kv_memory,
    format_size,
    parse_size,
)
from quintet.deploy.config.model.chat_templates import read_chat_templates
from quintet.deploy.config.model.hf_config import ModelFacts, Overrides, read_facts
from quintet.deploy.config.model.implementation import check_transformers_flags, note_of
from quintet.deploy.config.model.lora import adapters_config, memory_bytes
from quintet.deploy.config.model.packaged_models import packaged_generation
from quintet.deploy.config.model.pooling import pooling_config
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.stop_tokens import end_token_ids
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.deploy.config.model.weights import (
    WeightFacts,
    check_activations,
    check_weights_fit,
    choose_quantization,
    num_parameters_of,
    read_served_facts,
    weight_bytes_of,
)
from quintet.deploy.config.parsers import choose_parsers, reasoning_parser, with_ending
from quintet.deploy.config.sections import (
    Device,
    Kind,
    crowding,
    executor_config,
    folder_of,
    frontend_config,
    processes_config,
    recording_folder,
    scheduler_config,
)
from quintet.deploy.config.speculation import (
    check_model,
    check_support,
    notes_on_device,
    notes_on_keys,
    with_verifier,
)
from quintet.executor.backends.platforms.cores import usable_cores
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import DTYPE_BYTES, CacheConfig, Dtype, EngineConfig, KvFormat, ModelConfig
from quintet.wire.kv_spec import KvSpec
from quintet.wire.model_files import AdapterConfig, hf_config_path, is_gguf


@dataclass(frozen=True, slots=True)
class Resolution:
    """The configuration and facts collected while resolving it."""

    config: EngineConfig
    weights: WeightFacts | None
    """None if no weights are read: mock executor or dummy weights."""
    num_parameters: int | None
    """From the weight headers, else from ``config.json``; None if only the executor knows it."""
    stored: Format | None
    """Quantization format of the checkpoint; None if it is not quantized."""
    decoder: DecoderSpec | None
    """Quintet's layers; None if only transformers or another package has the architecture."""
    kv_formats: dict[KvFormat, KvSpec]
    """KV layout for each supported data type."""
    notes: list[str] = field(default_factory=list)
    """Unexpected derived values: one line each, for the startup log."""


def resolve(options: Options, run_dir: Path, http: bool = True, external_frontends: int = 0) -> Resolution:
    """Resolve the configuration. ``http=False`` starts no HTTP frontends: the Python API is its own frontend.

    May download the model from the hub. Raises `ConfigError`.
    """
    options = with_verifier(with_kv_transfer_config(options))
    kind, device = _check_flags(options, run_dir)
    reads_weights = kind == "torch" and options.load_format == "auto"
    facts = _read_facts(options, reads_weights)
    notes = [*notes_on_keys(options), *notes_on_transfer(options), *facts.notes]
    facts = ranks.of_one_rank(options, facts, device)
    sum_leaves = ranks.sum_leaves(options, facts)
    quantization = choose_quantization(options, device, facts)
    if kind == "torch" and facts.implementation == "transformers":
        check_transformers_flags(options)
    check_activations(options, quantization)
    weights = read_served_facts(facts) if reads_weights else None
    dtype = facts.dtype if options.dtype == "auto" else options.dtype
    item_bytes = DTYPE_BYTES[dtype]
    rules.check_prompt_embeds(options, facts)
    rules.check_expert_widths(facts, device, item_bytes)
    kv = rules.kv_spec(options, device, facts, item_bytes)
    draft = read_draft(options, device, facts, kv, dtype)
    # Rank 0 alone has the draft model. Memory is planned per rank, so each counts a part; KV memory also per host.
    block_bytes = draft.block_bytes * options.decode_context_parallel_size * options.nnodes if draft else 0
    draft_bytes = -(-block_bytes // options.tensor_parallel_size)
    kv = msgspec.structs.replace(kv, draft_bytes=draft_bytes)
    ranks.check_attention(options, facts, device, kv.block_size)
    ranks.check_gpu_rows(options, facts, device, item_bytes)
    notes += _notes_on_model(options, kind, device, facts, kv, dtype)
    num_parameters = num_parameters_of(facts, weights)
    copied, adapters = ranks.num_copied_parameters(options, facts), adapters_config(options, facts, device)
    weight_bytes = options.tensor_parallel_size * memory_bytes(adapters, item_bytes) + weight_bytes_of(
        num_parameters or 0, item_bytes, quantization, facts.stored, weights, copied
    )
    memory = _rank_memory(options, kind, device, facts, item_bytes, weight_bytes, draft)
    cache, fitted = _cache_config(options, kind, device, facts, kv, memory, notes)
    notes += filter(None, (network.check(options) if http else None,))
    model = _model_config(options, facts, dtype, kv, fitted, adapters, notes)
    stage_bytes = memory.weight_bytes // options.pipeline_parallel_size if reads_weights else 0
    config = EngineConfig(
        run_dir=str(run_dir),
        model=model,
        cache=cache,
        scheduler=scheduler_config(options, kind, device, fitted, notes, draft.of(model) if draft else None),
        executor=executor_config(
            options, kind, device, quantization, stage_bytes, memory.shared_bytes, sum_leaves
        ),
        frontend=frontend_config(options),
        processes=processes_config(options, http, external_frontends),
        log_level=options.log_level,
        trace=folder_of(options.trace),
        record=recording_folder(options.record),
        record_bytes=options.record_mb << 20,
    )
    kv_formats = {
        name: msgspec.structs.replace(each, draft_bytes=draft_bytes)
        for name, each in rules.kv_formats(options, device, facts, item_bytes).items()
    }
    return Resolution(config, weights, num_parameters, facts.stored, facts.decoder, kv_formats, notes)


def _check_flags(options: Options, run_dir: Path) -> tuple[Kind, Device]:
    """Check the flags that need no model. Return the kind of executor, and its device."""
    rules.check_ranges(options)
    rules.check_mock_only_flags(options)
    rules.check_run_dir_length(run_dir)
    kind: Kind = "mock" if options.executor == "mock" else "torch"
    device: Device = "cpu"
    if kind == "torch":
        device = default_device() if options.device == "auto" else options.device
    rules.check_device_flags(options, device)
    ranks.check_flags(options, device)
    check_support(options, kind, device)
    return kind, device


def _read_facts(options: Options, reads_weights: bool) -> ModelFacts:
    folder = locate_model(
        options.model, reads_weights, with_code=options.trust_remote_code, revision=options.revision
    )
    packaged = packaged_generation(options.model) if options.generation_config == "auto" else {}
    overrides = Overrides(options.hf_overrides, {**packaged, **options.override_generation_config})
    return read_facts(
        folder, options.generation_config, options.model_impl, overrides, with_weights=reads_weights
    )


def _notes_on_model(
    options: Options, kind: Kind, device: Device, facts: ModelFacts, kv: KvSpec, dtype: Dtype
) -> list[str]:
    """Return notes on the implementation, the KV layout and the processors. Raises `ConfigError`."""
    check_model(options, device, kv, facts.implementation)
    notes: list[str | None] = [*notes_on_device(options, device)]
    if kind == "torch" and facts.implementation == "transformers":
        notes.append(note_of(options.model_impl, facts.architecture))
    if options.kv_cache_dtype in DTYPE_BYTES and options.kv_cache_dtype != dtype:
        notes.append(
            f"--kv-cache-dtype {options.kv_cache_dtype}: the KV cache has the model's data type, {dtype};"
            f" --dtype {options.kv_cache_dtype} changes both"
        )
    if options.block_size is None and kv.block_size > rules.DEFAULT_BLOCK_SIZE:
        notes.append(f"KV blocks have {kv.block_size} tokens, to match the size of a recurrent state")
    if options.kv_cache_dtype == "auto" and facts.stored_kv_format is not None:
        notes.append(facts.stored_kv_format.note(device))
    if kind == "torch" and device == "cpu":
        local_ranks = options.tensor_parallel_size * options.pipeline_parallel_size // options.nnodes
        notes.append(crowding(options.data_parallel_size, local_ranks, usable_cores()))
    return [*filter(None, notes)]


@dataclass(frozen=True, slots=True)
class _RankMemory:
    available_bytes: int
    reserved_bytes: int
    """Part of the available memory that weights and shared memory use."""
    weight_bytes: int
    """Weights of the served model, over all stages and hosts."""
    shared_bytes: int
    """Memory shared by all ranks."""


def _rank_memory(
    options: Options,
    kind: Kind,
    device: Device,
    facts: ModelFacts,
    item_bytes: int,
    weight_bytes: int,
    draft: DraftFacts | None,
) -> _RankMemory:
    """Divide memory among ranks. weight_bytes: of all ranks. Raises `ConfigError` if the weights do not fit."""
    num_ranks, stages, hosts = options.tensor_parallel_size, options.pipeline_parallel_size, options.nnodes
    draft_weight_bytes, num_observed = (draft.weight_bytes, len(draft.aux_layers)) if draft else (0, 0)
    weight_bytes //= num_ranks
    # Rank 0 alone has the draft model. Memory is planned per rank, so each counts a part.
    local_weight_bytes = weight_bytes // hosts + draft_weight_bytes // num_ranks
    available_bytes = available_ram_bytes() // (options.data_parallel_size * num_ranks)
    if kind == "torch" and device == "cpu":
        check_weights_fit(local_weight_bytes, available_bytes, options.data_parallel_size, num_ranks)
    shared_bytes = ranks.memory_shared(options, facts, device, item_bytes, num_observed)
    # Several stages divide shared memory among hosts; ranks of a single stage have all of it on each host.
    local_shared_bytes = shared_bytes // (hosts if stages > 1 else 1)
    reserved_bytes = local_weight_bytes + local_shared_bytes // num_ranks
    return _RankMemory(available_bytes, reserved_bytes, weight_bytes, shared_bytes)


def _cache_config(
    options: Options,
    kind: Kind,
    device: Device,
    facts: ModelFacts,
    kv: KvSpec,
    memory: _RankMemory,
    notes: list[str],
) -> tuple[CacheConfig, int]:
    """Return the KV cache section, and the maximum context length that fits into KV memory. Appends to ``notes``."""
    path = hf_config_path(facts.path)
    max_model_len = rules.derive_max_model_len(options.max_model_len, facts.spec.reach, path)
    step_tokens = rules.most_step_tokens(options, device, max_model_len)
    left_bytes, fixed_rope_len = memory.available_bytes - memory.reserved_bytes, facts.spec.fixed_rope_len
    memory_bytes = _kv_memory(options, device, kind, left_bytes, kv, max_model_len, step_tokens)
    fitted = max_model_len
    if memory_bytes:
        fitted = rules.fit_max_model_len(
            kv,
            memory_bytes,
            max_model_len,
            step_tokens,
            options.max_model_len is not None,
            options.kv_cache_memory is not None,
            options.tensor_parallel_size // options.decode_context_parallel_size,
        )
    if fitted < max_model_len:
        notes.append(
            f"max_model_len is {fitted}, not the model's {max_model_len}: the KV cache has {format_size(memory_bytes)}"
        )
    # Keys of a longer sequence would depend on its length.
    can_share_prefixes = fixed_rope_len is None or fitted <= fixed_rope_len
    if options.enable_prefix_caching and not can_share_prefixes:
        notes.append(
            f"prefix caching is disabled: this model's RoPE changes in sequences of more than {fixed_rope_len} tokens, "
            f"so keys cannot be shared; --max-model-len {fixed_rope_len} enables it"
        )
    has_prefix_cache = options.enable_prefix_caching and can_share_prefixes
    source = KvSource(options, device, kv, fitted, step_tokens, has_prefix_cache)
    cache = CacheConfig(
        memory_bytes=rules.cap_kv_memory(kv, memory_bytes, options.max_num_seqs, fitted, step_tokens),
        enable_prefix_caching=has_prefix_cache,
        dtype=rules.kv_format(options, device, facts),
        gpu_memory_utilization=options.gpu_memory_utilization,
        swap_bytes=rules.derive_swap_bytes(
            options.swap_space, device, kind, memory.available_bytes * options.tensor_parallel_size
        )
        * options.decode_context_parallel_size
        // options.tensor_parallel_size,
        num_parts=source.parts,
        events=kv_events_config(options, kv, has_prefix_cache=has_prefix_cache),
        peers=kv_peers_config(source),
        disk=kv_disk_config(source),
        store=kv_store_config(source),
    )
    return cache, fitted


def _model_config(
    options: Options,
    facts: ModelFacts,
    dtype: Dtype,
    kv: KvSpec,
    max_model_len: int,
    adapters: list[AdapterConfig],
    notes: list[str],
) -> ModelConfig:
    """Return the model section. Appends to ``notes``."""
    tokenizer = facts.path
    if options.tokenizer is not None:
        tokenizer = locate_model(
            options.tokenizer,
            with_weights=False,
            flag="--tokenizer",
            revision=options.tokenizer_revision,
        )
    if is_gguf(tokenizer):
        tokenizer = tokenizer_folder(tokenizer)
    templates = read_chat_templates(tokenizer, options.chat_template)
    parsers, note = choose_parsers(reasoning_parser(options), options.tool_call_parser, templates)
    parsers, ending_note = with_ending(parsers, options.reasoning_config)
    folder = tokenizer_folder(tokenizer)
    endings = end_token_ids(facts.eos_token_ids, folder, templates)
    facts, more_notes = rules.fit_facts(dataclasses.replace(facts, eos_token_ids=endings), max_model_len)
    notes += [*more_notes, *filter(None, (note, ending_note))]
    return ModelConfig(
        path=str(facts.path),
        tokenizer_path=str(folder),
        served_names=options.served_model_name or [options.model or embedded.NAME],
        architecture=facts.architecture,
        hf_config=facts.hf_config,
        implementation=facts.implementation,
        trust_remote_code=options.trust_remote_code,
        dtype=dtype,
        vocab_size=facts.spec.vocab_size,
        embedding_width=facts.embedding_width,
        max_model_len=max_model_len,
        eos_token_ids=facts.eos_token_ids,
        kv=kv,
        generation_defaults=facts.generation_defaults,
        chat_templates=templates,
        chat_template_content_format=options.chat_template_content_format,
        parsers=parsers,
        pooling=pooling_config(options, facts, notes),
        adapters=adapters,
    )


def _kv_memory(
    options: Options,
    device: str,
    kind: str,
    available_bytes: int,
    kv: KvSpec,
    max_model_len: int,
    step_tokens: int,
) -> int:
    """Return the KV memory in bytes of a rank, or of the ranks that share one KV cache; over all stages.

    Either the flag's value or a share of the memory that weights leave. Other hosts are assumed to have as much memory as
    this one. 0 on a GPU: only the executor knows the free device memory.
    """
    together = options.decode_context_parallel_size
    if options.kv_cache_memory is not None:
        requested_bytes = parse_size(options.kv_cache_memory, "--kv-cache-memory")
        return requested_bytes * together // options.tensor_parallel_size
    if kind == "mock":
        return rules.cap_kv_memory(kv, 1 << 62, options.max_num_seqs, max_model_len, step_tokens)
    if device == "cuda":
        return 0
    scratch_bytes = ATTENTION_SCRATCH_BYTES * options.pipeline_parallel_size // options.nnodes
    left_bytes = available_bytes - scratch_bytes
    if options.kv_cache_memory_share is not None:
        of_host = int(left_bytes * options.kv_cache_memory_share)
    else:
        of_host = default_kv_memory(kv, left_bytes, max_model_len, step_tokens)
    return max(1, of_host * options.nnodes * together)
