"""Convert a GGUF file's metadata to a config: the values of ``config.json``. Imports no torch.

The readers of `quintet.executor.model_config` check the values as for any other config.

`REFUSED` has the unsupported architectures, each with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from quintet.executor.checkpoints.gguf.architectures import ARCHITECTURES, Architecture
from quintet.executor.checkpoints.gguf.common_values import KEYS, is_in_later_layer, num_layers
from quintet.executor.checkpoints.gguf.gguf_metadata import GgufMetadata
from quintet.executor.checkpoints.gguf.header import Tensor
from quintet.executor.checkpoints.gguf.parts import GgufParts
from quintet.executor.model_config.hf_config import FILE_KEYS
from quintet.executor.model_config.shape import SEPARATE_MATRICES
from quintet.wire.errors import ConfigError

_REASONS = {
    "it is an embedding or encoder model and generates no text": (
        "bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert"
        " nomic-bert-moe t5encoder wavtokenizer-dec"
    ),
    "it is an encoder-decoder model": "t5",
    "it is a diffusion model, not an autoregressive one": "dream llada llada-moe rnd1",
    "its recurrent layers are not implemented": "arwkv7 kimi-linear plamo2 rwkv6 rwkv6qwen2 rwkv7",
    "the family is not implemented; its checkpoint may run through transformers (docs/fallback.md)": (
        "afmoe arctic codeshell dbrx gemma3n gemma4 glm-dsa grok grovemoe jais maincoder mimo2 mistral4 nemotron_h_moe"
        " openelm pangu-embedded plamo plamo3 plm refact smallthinker step35"
    ),
    "it is a multimodal model": "chameleon cogvlm deepseek2-ocr hunyuan_vl paddleocr",
    "use the original checkpoint": "gptj",
}
"""Names of the unsupported architectures by reason."""

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Keyed by ``general.architecture``."""


_NULLS = ("q_lora_rank",)
"""Keys with a meaningful null; for other keys null means the family's default."""
_NARROW = ("gemma", "glm4", "plamo")
"""Architectures with activations beyond the range of float16."""


def hf_config_of_gguf(parts: GgufParts) -> str:
    """Return the text of the model's config. Raises `ConfigError` for an unsupported architecture."""
    metadata = GgufMetadata.of(parts)
    values = architecture_of(metadata).hf_config(metadata)
    values |= {"dtype": _dtype(metadata), SEPARATE_MATRICES: True}
    values[FILE_KEYS] = {
        key: f"{metadata.architecture}.{theirs}" for key, theirs in KEYS.items() if key in values
    }
    types = sorted({tensor.type.name for tensor in metadata.tensors.values() if tensor.type.block > 1})
    if types:
        values["quantization_config"] = {"quant_method": "gguf", "types": types}
    return json.dumps({key: value for key, value in values.items() if value is not None or key in _NULLS})


def loaded_tensors(parts: GgufParts) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the served model: without layers for next-token prediction."""
    count = num_layers(GgufMetadata.of(parts))
    return ((name, tensor) for name, tensor in parts.tensors() if not is_in_later_layer(name, count))


def predictor_tensors(parts: GgufParts, layers: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of layers for next-token prediction. Their names begin with those of ``layers``, in order."""
    first = num_layers(GgufMetadata.of(parts))
    for name, tensor in parts.tensors():
        if is_in_later_layer(name, first):
            _, number, rest = name.split(".", 2)
            rest = rest.removeprefix("nextn.").replace("shared_head_", "shared_head.")
            yield from ((f"{each}.{rest}", tensor) for each in layers[int(number) - first :][:1])


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
    largest = max(metadata.tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    kind = "" if largest is None else largest.type.name
    if kind == "F16" and not metadata.architecture.startswith(_NARROW):
        return "float16"
    return "float32" if kind == "F32" else "bfloat16"
