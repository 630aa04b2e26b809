"""Scheduler, executor, process and frontend sections of the configuration, derived from flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from quintet.deploy.config import network, rules
from quintet.deploy.config.eplb import eplb_config
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import hosts_config
from quintet.deploy.config.memory import parse_size
from quintet.deploy.config.speculation import speculative_config
from quintet.process.record import SUFFIX
from quintet.wire.config import (
    DraftModelConfig,
    ExecutorConfig,
    FrontendConfig,
    ProcessesConfig,
    Quantization,
    SchedulerConfig,
)
from quintet.wire.errors import ConfigError

Kind = Literal["torch", "mock"]
Device = Literal["cpu", "cuda"]


def scheduler_config(
    options: Options,
    kind: Kind,
    device: Device,
    max_model_len: int,
    notes: list[str],
    draft: DraftModelConfig | None,
) -> SchedulerConfig:
    """Return the scheduler section. draft: the draft model of speculative decoding. Appends to ``notes``."""
    stages, depth = options.pipeline_parallel_size, options.max_steps_in_flight
    if stages > 1 and depth <= stages:
        depth = stages + 1
        notes.append(
            f"--max-steps-in-flight is {depth}, not {options.max_steps_in_flight}: "
            f"{stages} pipeline stages need one step each and one more"
        )
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=rules.derive_max_num_batched_tokens(options, device, max_model_len),
        policy=options.scheduling_policy,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        resume_grace_s=options.stream_grace,
        step_target_ms=rules.derive_step_target_ms(options, kind, device),
        max_steps_in_flight=depth,
        stages=stages,
        deadline_admission=options.deadline_admission,
        speculative=speculative_config(options, kind, device, draft),
        audit=options.audit,
    )


def executor_config(
    options: Options,
    kind: Kind,
    device: Device,
    quantization: Quantization,
    weight_bytes: int,
    shared_bytes: int,
    sum_leaves: int,
) -> ExecutorConfig:
    return ExecutorConfig(
        kind=kind,
        device=device,
        load_format=options.load_format,
        quantization=quantization,
        activation_dtype=options.activation_dtype,
        logits_dtype=options.logits_dtype,
        packed_cache=folder_of(options.packed_cache),
        threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        decode_context_parallel_size=options.decode_context_parallel_size,
        expert_parallel=options.enable_expert_parallel,
        eplb=eplb_config(options),
        sum_leaves=sum_leaves,
        hosts=hosts_config(options),
        pin_threads=options.pin_threads,
        seed=options.seed,
        batch_invariant=options.batch_invariant,
        enforce_eager=options.enforce_eager,
        allow_torch_kernels=options.allow_torch_kernels,
        attention_backend=options.attention_backend,
        step_ms=options.step_ms,
        mock_script=None if options.mock_script is None else str(Path(options.mock_script).absolute()),
        weight_bytes=weight_bytes,
        shared_bytes=shared_bytes,
    )


def crowding(num_engines: int, num_ranks: int, num_cores: int) -> str | None:
    """Return a warning if there are more engines or ranks than CPU cores, else None."""
    if num_engines * num_ranks <= num_cores:
        return None
    if num_ranks > 1:
        engines = f" of {num_engines} engines" * (num_engines > 1)
        return f"{num_ranks} ranks{engines} share {num_cores} core{'s' * (num_cores > 1)} and wait for each other"
    return (
        f"--data-parallel-size {num_engines}: the engines share {num_cores} core{'s' * (num_cores > 1)}; fewer engines are "
        "faster"
    )


def processes_config(options: Options, http: bool, external_frontends: int) -> ProcessesConfig:
    """Return the process section: counts and timeouts."""
    return ProcessesConfig(
        frontends=options.frontends if http else 0,
        external_frontends=external_frontends,
        tokenizers=options.tokenizers,
        engines=options.data_parallel_size,
        detokenizers=options.detokenizers,
        standby=options.standby and http,
        boot_timeout_s=options.boot_timeout,
        max_restarts=options.max_restarts,
        drain_timeout_s=options.drain_timeout,
        stall_s=options.stall_timeout,
    )


def frontend_config(options: Options) -> FrontendConfig:
    return FrontendConfig(
        host=options.host,
        port=options.port,
        api_keys=options.api_key,
        admin_key=options.admin_key,
        uds=options.uds,
        allowed_origins=network.listed(options.allowed_origins, "--allowed-origins"),
        allowed_methods=network.listed(options.allowed_methods, "--allowed-methods"),
        allowed_headers=network.listed(options.allowed_headers, "--allowed-headers"),
        allow_credentials=options.allow_credentials,
        chat_template_kwargs=options.default_chat_template_kwargs,
        force_include_usage=options.enable_force_include_usage,
        tokens_as_ids=options.return_tokens_as_token_ids,
        reports_drafts=options.per_request_spec_decode_metrics == "summary",
        middleware=network.listed(options.middleware, "--middleware"),
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        tokenizer_info=options.enable_tokenizer_info_endpoint,
        docs=not options.disable_fastapi_docs,
        max_body_bytes=parse_size(options.max_body_bytes, "--max-body-bytes"),
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        max_logprobs=None if options.max_logprobs == -1 else options.max_logprobs,
        routing=options.routing,
        keep_alive_s=options.keep_alive_interval,
        write_timeout_s=options.write_timeout,
        header_timeout_s=options.header_timeout,
        root_path=options.root_path,
        log_requests=options.log_requests,
        prompt_embeds=options.enable_prompt_embeds,
        trust_request_chat_template=options.trust_request_chat_template,
        response_store=_response_store(options.response_store),
        response_store_entries=options.response_store_entries,
        response_store_bytes=parse_size(options.response_store_size, "--response-store-size"),
        response_store_hours=options.response_store_hours,
    )


def folder_of(path: str | None) -> str | None:
    """Return the absolute path of a folder given by a flag."""
    return None if path is None else str(Path(path).expanduser().absolute())


def recording_folder(path: str | None) -> str | None:
    """Return the absolute path of ``--record``. Raises `ConfigError` if it has a recording."""
    folder = folder_of(path)
    if folder is not None and any(Path(folder).glob(f"*/*{SUFFIX}")):
        raise ConfigError(
            f"--record {path}: the folder already contains a recording; remove it, or choose another folder"
        )
    return folder


def _response_store(path: str | None) -> str:
    if path is None:
        return ""
    file = Path(path).expanduser().absolute()
    try:
        existing = file if file.exists() else file.parent
        is_possible = not file.is_dir() and existing.exists() and os.access(existing, os.W_OK)
    except OSError:
        is_possible = False
    if not is_possible:
        raise ConfigError(
            f"--response-store {path}: it must be a writable file, or a new file in a writable folder"
        )
    return str(file)
