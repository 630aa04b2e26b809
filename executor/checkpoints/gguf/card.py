"""Convert a GGUF file's metadata to a model card: the values of ``config.json``. Imports no torch.

The readers of `quintet.executor.model_config` check the values as for any other card.
"""

from __future__ import annotations

import json

from quintet.executor.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from quintet.executor.checkpoints.gguf.common_values import KEYS
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata
from quintet.executor.checkpoints.gguf.parts import Parts
from quintet.executor.checkpoints.gguf.unsupported import REFUSED
from quintet.executor.model_config.card import FILE_KEYS
from quintet.executor.model_config.shape import SEPARATE_MATRICES
from quintet.wire.errors import ConfigError

_NULLS = ("q_lora_rank",)
"""Keys with a meaningful null; for other keys null means the family's default."""
_NARROW = ("gemma", "glm4", "plamo")
"""Architectures with activations beyond the range of float16."""


def card_of_gguf(parts: Parts) -> str:
    """Return the text of the model's card. Raises `ConfigError` for an unsupported architecture."""
    metadata = GgufMetadata.of(parts)
    values = architecture_of(metadata).card(metadata)
    values |= {"dtype": _dtype(metadata), SEPARATE_MATRICES: True}
    values[FILE_KEYS] = {
        key: f"{metadata.architecture}.{theirs}" for key, theirs in KEYS.items() if key in values
    }
    types = sorted({tensor.type.name for tensor in metadata.tensors.values() if tensor.type.block > 1})
    if types:
        values["quantization_config"] = {"quant_method": "gguf", "types": types}
    return json.dumps({key: value for key, value in values.items() if value is not None or key in _NULLS})


def architecture_of(metadata: GgufMetadata) -> Architecture:
    """Return the description of a file's architecture. Raises `ConfigError` with the supported ones."""
    known = ARCHITECTURES.get(metadata.architecture)
    if metadata.architecture in REFUSED:
        raise ConfigError(
            f"{metadata.path}: unsupported GGUF architecture {metadata.architecture!r}: {REFUSED[metadata.architecture]}"
        )
    if known is None:
        raise ConfigError(
            f"{metadata.path}: unsupported GGUF architecture {metadata.architecture!r:.60}; supported:"
            f" {', '.join(sorted(ARCHITECTURES))}. The original checkpoint may be supported, see docs/models.md"
        )
    return known


def _dtype(metadata: GgufMetadata) -> str:
    """Return the number format for computation: that of the largest tensor; bfloat16 for quantized files."""
    kind = (
        max(metadata.tensors.values(), key=lambda tensor: tensor.num_bytes).type.name
        if metadata.tensors
        else ""
    )
    if kind == "F16" and not metadata.architecture.startswith(_NARROW):
        return "float16"
    return "float32" if kind == "F32" else "bfloat16"
