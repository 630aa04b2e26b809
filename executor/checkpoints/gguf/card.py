"""From a GGUF file to the card that its model would have as a folder: the values of ``config.json``. Imports no torch.

A card goes through the readers of `quintet.executor.model_config` like any other; these check its numbers.
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
"""Values whose null says something in a card; elsewhere it is the family's default."""
_NARROW = ("gemma", "glm4", "plamo")
"""Architectures whose activations leave the range of float16."""


def card_of_gguf(parts: Parts) -> str:
    """Return the text of the model's card. Raises `ConfigError` for an architecture that is not read."""
    said = GgufMetadata.of(parts)
    values = architecture_of(said).card(said)
    values |= {"dtype": _dtype(said), SEPARATE_MATRICES: True}
    values[FILE_KEYS] = {
        key: f"{said.architecture}.{theirs}" for key, theirs in KEYS.items() if key in values
    }
    types = sorted({tensor.type.name for tensor in said.tensors.values() if tensor.type.block > 1})
    if types:
        values["quantization_config"] = {"quant_method": "gguf", "types": types}
    return json.dumps({key: value for key, value in values.items() if value is not None or key in _NULLS})


def architecture_of(said: GgufMetadata) -> Architecture:
    """Return what is known of a file's architecture. Raises `ConfigError` naming those that are."""
    known = ARCHITECTURES.get(said.architecture)
    if said.architecture in REFUSED:
        raise ConfigError(
            f"{said.path}: the architecture {said.architecture!r} is not read from GGUF: {REFUSED[said.architecture]}"
        )
    if known is None:
        raise ConfigError(
            f"{said.path}: the architecture {said.architecture!r:.60} is not read from GGUF; these are:"
            f" {', '.join(sorted(ARCHITECTURES))}. The original checkpoint may be served, see docs/models.md"
        )
    return known


def _dtype(said: GgufMetadata) -> str:
    """Return the number format to compute in: that of the largest tensor, bfloat16 where it is quantized."""
    kind = max(said.tensors.values(), key=lambda tensor: tensor.num_bytes).type.name if said.tensors else ""
    if kind == "F16" and not said.architecture.startswith(_NARROW):
        return "float16"
    return "float32" if kind == "F32" else "bfloat16"
