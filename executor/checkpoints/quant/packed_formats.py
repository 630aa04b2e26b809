"""Formats of packed weights, and the version of their layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat

FLOAT_FORMATS = {
    torch.bfloat16: WeightFormat.BF16,
    torch.float16: WeightFormat.FP16,
    torch.float32: WeightFormat.FP32,
}

LAYOUT = 2
"""Version of the packed bytes (csrc/cpu/linear/linear.hpp). Part of the packed cache's key: raise it when they change."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Storage format of a layer's weight and precision of its inputs."""

    weight_format: WeightFormat
    group: int = 0
    """Group size: adjacent inputs that share a scale; 0: one scale for each output."""
    inputs: Inputs = Inputs.SIXTEEN_BITS
    """Precision that inputs are rounded to, for integer weights."""

    @property
    def rounded_inputs(self) -> Inputs:
        """Precision of the inputs when 8 bits are requested."""
        has_wide = self.inputs is Inputs.SIXTEEN_BITS and self.weight_format.is_integer
        return Inputs.EIGHT_BITS_IN_GROUPS if has_wide else self.inputs
