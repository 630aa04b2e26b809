"""MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023) as gpt-oss has its experts.

    …_blocks  uint8 [experts, rows, depth / 32, 16]   two numbers in a byte, the first in the low bits
    …_scales  uint8 [experts, rows, depth / 32]       powers of two

The experts' layout says where their tensors are (`quintet.executor.models.blocks.expert_weights`); all other layers are plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.card import ModelCard
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A `Format`."""

    name: Quantization = "mxfp4"
    words: str = "mxfp4: experts of 4 bits in groups of 32"
    mark: str = "_blocks"
    ignored: Sequence[str] = ()
    takes_quantization: bool = True

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        return sum(entry.num_bytes for entry in contents.values())

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        return None


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format, of the one family that has it."""
    if "GptOssForCausalLM" not in (card.values.get("architectures") or ()):
        raise ConfigError(
            f"{card.path}: the weights are quantized ('mxfp4'), which is read of gpt-oss's experts alone: take the checkpoint"
            " that it was made from"
        )
    return Mxfp4()
