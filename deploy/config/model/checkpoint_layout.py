"""Facts of a checkpoint that ``config.json`` lacks or states wrongly: the layout of experts, and merged weights.

transformers 5 keeps experts stacked. Its checkpoints have either layout: Qwen 3.5 MoE is published stacked, and copies of it
have a tensor for each expert.

Weights can be merged with an adapter that was trained on a model quantized by bitsandbytes (QLoRA). Merging tools write 16-bit
weights, but leave the training's ``quantization_config``.
"""

from __future__ import annotations

from pathlib import Path

from quintet.deploy.config.model.output_layer import read_entries
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.names import spellings
from quintet.executor.model_config.spec import DecoderSpec, ModelSpec
from quintet.wire.model_files import Json, is_gguf

MERGED_NOTE = "config.json declares bitsandbytes, but the checkpoint has no quantized weights: they are read as they are"


def is_merged(folder: Path, stored: Format | None) -> bool:
    """Return whether a config declares bitsandbytes, but no tensor of the safetensors files is quantized."""
    if stored is None or stored.name != "bitsandbytes" or is_gguf(folder):
        return False
    return not any(
        path.suffix in PICKLED or any(stored.mark in name for name in read_entries(path))
        for path in checkpoint_files(folder)
    )


def has_stacked_experts(folder: Path, spec: ModelSpec) -> bool:
    """Return whether a checkpoint has stacked experts, although the spec has a tensor for each expert.

    Reads headers up to the first layer with experts. False for GGUF files and pickled files. Raises `ConfigError`.
    """
    if not isinstance(spec, DecoderSpec) or is_gguf(folder):
        return False
    layer = next((index for index, each in enumerate(spec.layers) if _is_separate(each.mlp)), None)
    if layer is None:
        return False
    names = spec.names
    stacked = spellings(names.in_layer(layer, names.experts_gate_up), names.prefix)
    first = names.in_layer(layer, names.expert_gate.format(expert=0))
    separate = tuple(f"{each}." for each in spellings(first, names.prefix))
    for path in checkpoint_files(folder):
        entries = {} if path.suffix in PICKLED else read_entries(path)
        if any(name in entries for name in stacked):
            return True
        if any(name.startswith(separate) for name in entries):
            return False
    return False


def _is_separate(mlp: object) -> bool:
    return isinstance(mlp, ExpertsSpec) and mlp.layout is ExpertsLayout.SEPARATE


def with_value(config: Json, key: str, value: object) -> Json:
    """Return a config with another value of a key, for the language model too if it is a part."""
    text = config.get("text_config")
    part = {"text_config": {**text, key: value}} if isinstance(text, dict) else {}
    return {**config, key: value, **part}
