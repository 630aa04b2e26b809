"""Loads a model folder with transformers and returns a `quintet.executor.runner.Runner`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.backends.torch.fallback.attention import PagedAttention, UnsupportedModel
from quintet.executor.backends.torch.fallback.checkpoint import Checkpoint
from quintet.executor.backends.torch.fallback.compat_check import check_calls, check_compat, refusal
from quintet.executor.backends.torch.fallback.host_runner import HostRunner
from quintet.executor.backends.torch.fallback.linears import keep_logit_sums, pack_linears
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.backends.torch.fallback.self_check import SelfCheck
from quintet.executor.model_config.card import ModelCard, card_of
from quintet.executor.model_config.spec import KvNeed
from quintet.executor.model_config.unknown import unknown
from quintet.executor.runner import Runner
from quintet.executor.slots import SlotTables
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded model that passed the self-check."""

    runner: Runner
    num_bytes: int
    """Size of the weights."""


def open_transformers_model(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, num_blocks: int, span: Span = no_span
) -> Opened:
    """Load the configured folder and run the self-check. Raises ConfigError with the reason for an unsupported model."""
    card, checkpoint = check_transformers_model(config, dtype)
    needs = _needs(card)
    attention = PagedAttention(config.model.max_model_len)
    try:
        if config.executor.load_format == "dummy":
            loaded = checkpoint.random_model(attention.name, device, config.executor.seed)
        else:
            loaded = checkpoint.load(attention.name, device)
        model = TransformersModel(loaded, attention)
        check_calls(model.calls, needs)
        self_check = SelfCheck(model, config.model, device)
        num_bytes = model.num_bytes
        logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
        if device.type == "cpu":
            pack_linears(loaded, dtype, logits_dtype)
        if logits_dtype != dtype:
            keep_logit_sums(loaded)
        runner = _runner(model, config, device, dtype, num_blocks, span)
        tables = SlotTables(
            config.scheduler.max_num_seqs, config.model.max_model_len, config.model.kv, device
        )
        self_check.run(runner, tables, num_blocks)
    except UnsupportedModel as why:
        raise refusal(card.path, checkpoint.config, why) from None
    return Opened(runner, num_bytes)


def check_transformers_model(
    config: EngineConfig, dtype: torch.dtype = torch.float32
) -> tuple[ModelCard, Checkpoint]:
    """Raise ConfigError for an unsupported model, without reading its weights."""
    card = card_of(config.model)
    checkpoint = Checkpoint(card, Path(config.model.path), dtype, config.model.trust_remote_code)
    check_compat(checkpoint, card.path, _needs(card), config.model.max_model_len)
    return card, checkpoint


def _needs(card: ModelCard) -> list[KvNeed]:
    return [need for need in unknown(card).kv_needs if need is not None]


def _runner(
    model: TransformersModel,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    num_blocks: int,
    span: Span,
) -> Runner:
    library = program_library() if device.type == "cpu" else None
    block_size, first = config.model.kv.block_size, model.attentions[0]
    if library is None or block_size % 16:
        if any(layer.num_kv_heads != first.num_kv_heads for layer in model.attentions):
            raise UnsupportedModel(
                "its layers have different numbers of KV heads, which only the compiled CPU kernels support"
            )
        return EagerRunner(model, device, dtype, config.model.kv, num_blocks, span)
    return HostRunner(library, model, config, dtype, num_blocks, span)
