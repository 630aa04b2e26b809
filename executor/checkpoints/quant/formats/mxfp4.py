"""MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023) in gpt-oss's experts.

    …_blocks  uint8 [experts, rows, depth / 32, 16]   two codes in a byte, the first in the low bits
    …_scales  uint8 [experts, rows, depth / 32]       exponents of powers of two

The experts' layout locates these tensors (`quintet.executor.models.sublayers.experts`); all other layers are
unquantized.
"""

from __future__ import annotations

from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError


def recognise(hf_config: HfConfig, section: HfConfig) -> Format:
    """Return the format; only gpt-oss has it."""
    if "GptOssForCausalLM" not in (hf_config.values.get("architectures") or ()):
        raise ConfigError(
            f"{hf_config.path}: quant_method 'mxfp4' is supported only for gpt-oss's experts: use the"
            " original checkpoint"
        )
    words = "mxfp4: experts of 4 bits in groups of 32"
    return Format("mxfp4", words, "_blocks", lambda layer: None, takes_quantization=True)
