"""Weights merged with an adapter that was trained on a model quantized by bitsandbytes (QLoRA).

Merging tools write 16-bit weights, but leave the training's ``quantization_config`` in ``config.json``.
"""

from __future__ import annotations

from pathlib import Path

from quintet.deploy.config.model.output_layer import read_entries
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.wire.model_files import Json, is_gguf

MERGED_NOTE = "config.json declares bitsandbytes, but the checkpoint has no quantized weights: they are read as they are"
_KEY, _PART = "quantization_config", "text_config"


def is_merged(folder: Path, stored: Format | None) -> bool:
    """Return whether a config declares bitsandbytes, but no tensor of the safetensors files is quantized."""
    if stored is None or stored.name != "bitsandbytes" or is_gguf(folder):
        return False
    return not any(
        path.suffix in PICKLED or any(stored.mark in name for name in read_entries(path))
        for path in checkpoint_files(folder)
    )


def without_quantization(config: Json) -> Json:
    """Return a config without a quantization format, of the language model too if it is a part."""
    text = config.get(_PART)
    part = {_PART: {**text, _KEY: None}} if isinstance(text, dict) else {}
    return {**config, _KEY: None, **part}
