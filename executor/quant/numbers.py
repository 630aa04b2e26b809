"""How packed weights store their numbers, and which version of the packed form that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.ops.host_linear import WeightFormat

FLOAT_FORMATS = {
    torch.bfloat16: WeightFormat.BF16,
    torch.float16: WeightFormat.FP16,
    torch.float32: WeightFormat.FP32,
}

LAYOUT = 2
"""Version of what packed bytes mean (csrc/cpu/linear.hpp). Part of the packed cache's key: raise it when that changes."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a layer's numbers are stored and multiplied."""

    weight_format: WeightFormat
    group: int = 0
    """Neighbouring inputs that share a scale; 0: one scale for each output."""
    int8_activations: bool = False
