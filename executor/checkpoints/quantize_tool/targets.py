"""What `quintet quantize` writes as folders, by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What a format makes of every linear layer."""

    bits: int
    group: int
    """Inputs that share a scale; 0: all of a row."""
    int8_activations: bool
    words: str
    """For people."""
    is_calibrated: bool = False
    """Whether a text is read while layers are rounded."""
    is_awq: bool = False
    """Whether tensors are AutoAWQ's rather than those of compressed-tensors."""


TARGETS: Mapping[str, Target] = {
    "int8": Target(8, 0, False, "W8A16: 8 bits, a scale for each output"),
    "w8a8": Target(8, 0, True, "W8A8: 8 bits, and activations in 8 bits, a scale for each token"),
    "int4": Target(4, 128, False, "W4A16: 4 bits in groups of 128, rounded to the nearest"),
    "gptq": Target(
        4,
        128,
        False,
        "W4A16 by GPTQ: the same, each rounding made up for by the next; needs --calibration",
        is_calibrated=True,
    ),
    "awq": Target(
        4,
        128,
        False,
        "AWQ: 4 bits with zero points, more steps for large inputs; needs --calibration",
        is_calibrated=True,
        is_awq=True,
    ),
}
"""By name."""
