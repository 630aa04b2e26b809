"""MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023) in gpt-oss's experts.

    …_blocks  uint8 [experts, rows, depth / 32, 16]   two codes in a byte, the first in the low bits
    …_scales  uint8 [experts, rows, depth / 32]       exponents of powers of two

The experts' layout locates these tensors (`quintet.executor.models.blocks.expert_weights`); all other layers are
unquantized.
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
    """Return the format; only gpt-oss has it."""
    if "GptOssForCausalLM" not in (card.values.get("architectures") or ()):
        raise ConfigError(
            f"{card.path}: quant_method 'mxfp4' is supported only for gpt-oss's experts: use the"
            " original checkpoint"
        )
    return Mxfp4()
