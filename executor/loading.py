"""Load the configured model with its weights, or one process's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.backends.platforms.platform import Platform
from quintet.executor.checkpoints.gguf.weights import open_gguf
from quintet.executor.checkpoints.quant.blocks import read_blocks
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.quant.kv_scales import read_kv_scales
from quintet.executor.checkpoints.quant.registry import RoundedInputs, open_quantization
from quintet.executor.checkpoints.weights.load import fill_randomly, load_checkpoint, open_files
from quintet.executor.checkpoints.weights.mapped import WeightFile
from quintet.executor.checkpoints.weights.packed_cache import PackedCache
from quintet.executor.lora.adapters import Adapters
from quintet.executor.model_config.draft_heads import DRAFT_HEADS
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.model_config.share import WHOLE, Share
from quintet.executor.models.model import CausalModel, Setting, build_model
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

MODEL_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    config: EngineConfig,
    platform: Platform,
    *,
    on_device: bool = False,
    share: Share = WHOLE,
    ahead: HugeMemory | None = None,
) -> CausalModel:
    """Return the configured model, or a rank's share of it, with its weights. Raises `ConfigError`.

    on_device: whether our GPU kernels multiply by the weights. ahead: reserved memory for them, see
    `quintet.executor.checkpoints.weights.store.reserve`.
    """
    hf_config = hf_config_of(config.model)
    stored = recognise(hf_config)
    files = None if config.executor.load_format == "dummy" else _open_files(config.model)
    contents = (
        None if files is None else {name: file.entries[name] for file in files for name in file.entries}
    )
    quantization = open_quantization(config.executor.quantization, stored, contents, on_device=on_device)
    rounded = RoundedInputs(quantization) if config.executor.activation_dtype == "int8" else None
    dtype = MODEL_DTYPES[config.model.dtype]
    logits_dtype = torch.float32 if config.executor.logits_dtype == "float32" else dtype
    adapters = Adapters(config.model.adapters, dtype, platform.device) if config.model.adapters else None
    setting = Setting(platform.device, dtype, rounded or quantization, share, logits_dtype, adapters)
    model = build_model(config.model.architecture, hf_config, setting)
    if adapters is not None:
        weights = model.weights
        adapters.check_used(config.model.architecture, weights.prefix, weights.on_other_ranks)
        weights.num_bytes += adapters.num_bytes
    if (
        rounded is not None and not rounded.num_layers and share.stages == 1
    ):  # other stages may have integer weights
        raise ConfigError(_why_no_rounding(hf_config.path, stored))
    check_agreement(model, config.model, hf_config.path, share)
    with torch.inference_mode():
        if files is None:
            fill_randomly(model.weights, config.executor.seed)
        else:
            load_checkpoint(model.weights, files, _packed_cache(config, share), ahead)
            if config.cache.dtype == "fp8":
                read_kv_scales(files, model.attentions, by_head=platform.device.type == "cpu")
        model.weights.release()
    return model


def _why_no_rounding(path: str, stored: Format | None) -> str:
    if linear_library() is None:
        return (
            "--activation-dtype int8 needs Quintet's host kernels, and they are not built: install a C++ compiler"
            " (g++ or clang++) and reinstall Quintet, or drop the flag"
        )
    words = "floating-point numbers" if stored is None else stored.words
    return f"{path}: --activation-dtype int8 needs integer weights, but this model has {words}: drop the flag"


def _open_files(model: ModelConfig) -> Sequence[WeightFile]:
    path = Path(model.path)
    return (
        open_gguf(path, model, MODEL_DTYPES[model.dtype], read_blocks) if is_gguf(path) else open_files(path)
    )


def _packed_cache(config: EngineConfig, share: Share) -> PackedCache | None:
    if config.executor.packed_cache is None:
        return None
    return PackedCache(
        Path(config.executor.packed_cache),
        Path(config.model.path),
        config.executor.quantization,
        config.model.dtype,
        share.label or (config.model.architecture if config.model.architecture in DRAFT_HEADS else ""),
    )


def check_agreement(model: CausalModel, resolved: ModelConfig, path: str, share: Share = WHOLE) -> None:
    """Check that KV layers and vocabulary of the resolved configuration equal the config's. Raises `ConfigError`."""
    attended = {layer for group in resolved.kv.groups if not group.is_state for layer in group.layers}
    for name, ours, theirs in (
        (
            "layers with attention",
            len(model.attentions),
            sum(share.has_layer(layer) for layer in attended),
        ),
        ("tokens in the vocabulary", model.vocab_size, resolved.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(f"{path} has {ours} {name}, but the resolved configuration has {theirs}")
