"""How packed weights store their numbers, and which version of the packed form that is."""

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
"""Version of what packed bytes mean (csrc/cpu/linear.hpp). Part of the packed cache's key: raise it when that changes."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a layer's numbers are stored and multiplied."""

    weight_format: WeightFormat
    group: int = 0
    """Neighbouring inputs that share a scale; 0: one scale for each output."""
    inputs: Inputs = Inputs.SIXTEEN_BITS
    """What inputs are rounded to, where weights are integers."""

    @property
    def rounded_inputs(self) -> Inputs:
        """What inputs are rounded to where 8 bits are asked for."""
        has_wide = self.inputs is Inputs.SIXTEEN_BITS and self.weight_format.is_integer
        return Inputs.EIGHT_BITS_IN_GROUPS if has_wide else self.inputs
