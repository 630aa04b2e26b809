"""Folder formats of `quintet quantize`, by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """Format of every quantized linear layer."""

    bits: int
    group: int
    """Group size; 0: the whole row."""
    int8_activations: bool
    words: str
    """Description for messages."""
    is_calibrated: bool = False
    """True: rounding needs a calibration text."""
    is_awq: bool = False
    """True: tensors of AutoAWQ instead of compressed-tensors."""


TARGETS: Mapping[str, Target] = {
    "int8": Target(8, 0, False, "W8A16: 8 bits, a scale for each output"),
    "w8a8": Target(8, 0, True, "W8A8: 8 bits, and activations in 8 bits, a scale for each token"),
    "int4": Target(4, 128, False, "W4A16: 4 bits in groups of 128, rounded to the nearest"),
    "gptq": Target(
        4,
        128,
        False,
        "W4A16 by GPTQ: the same with error compensation; needs --calibration",
        is_calibrated=True,
    ),
    "awq": Target(
        4,
        128,
        False,
        "AWQ: 4 bits with zero points and input scaling; needs --calibration",
        is_calibrated=True,
        is_awq=True,
    ),
}
"""Keyed by name."""
