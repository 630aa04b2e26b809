"""Transformers back end: loads a model folder with transformers, checks it, and makes its worker."""

from __future__ import annotations

from pathlib import Path

import torch

from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.backends.torch.fallback.attention import PagedAttention, UnsupportedModel
from quintet.executor.backends.torch.fallback.checkpoint import Checkpoint
from quintet.executor.backends.torch.fallback.compat_check import (
    SelfCheck,
    check_calls,
    check_compat,
    refusal,
)
from quintet.executor.backends.torch.fallback.host_runner import HostRunner, keep_logit_sums, pack_linears
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.context import WorkerContext
from quintet.executor.interface import StepWorker
from quintet.executor.kv_memory import KvMemory
from quintet.executor.loading import MODEL_DTYPES
from quintet.executor.model_config.hf_config import HfConfig, hf_config_of
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.model_config.unknown import unknown
from quintet.executor.runner import Runner
from quintet.executor.slots import SlotTables
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig


def make_worker(context: WorkerContext) -> StepWorker:
    """See `quintet.executor.backends.registry.Backend`. Raises `ConfigError` with the reason for an unsupported model."""
    return Worker(context, _open_runner(context))


def _open_runner(context: WorkerContext) -> Runner:
    """Load the configured folder and run the self-check."""
    config, device, dtype = context.config, context.platform.device, MODEL_DTYPES[context.config.model.dtype]
    hf_config, checkpoint = check_transformers_model(config, dtype)
    needs = _needs(hf_config)
    attention = PagedAttention(config.model.max_model_len)
    try:
        if config.executor.load_format == "dummy":
            loaded = checkpoint.random_model(attention.name, device, config.executor.seed)
        else:
            loaded = checkpoint.load(attention.name, device)
        model = TransformersModel(loaded, attention)
        check_calls(model.attentions, needs)
        self_check = SelfCheck(model, config.model, device)
        context.add(model.num_bytes)
        logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
        if device.type == "cpu":
            pack_linears(loaded, dtype, logits_dtype)
        if logits_dtype != dtype:
            keep_logit_sums(loaded)
        runner = _runner(model, context, context.reserve_kv(dtype))
        tables = SlotTables(
            config.scheduler.max_num_seqs, config.model.max_model_len, config.model.kv, device
        )
        self_check.run(runner, tables, context.num_blocks())
    except UnsupportedModel as why:
        raise refusal(hf_config.path, checkpoint.config, why) from None
    return runner


def check_transformers_model(
    config: EngineConfig, dtype: torch.dtype = torch.float32
) -> tuple[HfConfig, Checkpoint]:
    """Raise ConfigError for an unsupported model, without reading its weights."""
    hf_config = hf_config_of(config.model)
    checkpoint = Checkpoint(hf_config, Path(config.model.path), dtype, config.model.trust_remote_code)
    check_compat(checkpoint, hf_config.path, _needs(hf_config), config.model.max_model_len)
    return hf_config, checkpoint


def _needs(hf_config: HfConfig) -> list[KvNeed]:
    return [need for need in unknown(hf_config).kv_needs if need is not None]


def _runner(model: TransformersModel, context: WorkerContext, kv: KvMemory) -> Runner:
    config, device = context.config, context.platform.device
    library = program_library() if device.type == "cpu" else None
    block_size, first = config.model.kv.block_size, model.attentions[0]
    if library is None or block_size % 16:
        if any(layer.num_kv_heads != first.num_kv_heads for layer in model.attentions):
            raise UnsupportedModel(
                "its layers have different numbers of KV heads, which only the compiled CPU kernels support"
            )
        return EagerRunner(model, device, kv, context.span)
    return HostRunner(library, model, kv, config.scheduler, context.span)
