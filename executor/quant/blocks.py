"""Rows of a GGUF file's blocks, and how the host keeps them: in packed formats of their own, nothing rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.gguf.dequantize import dequantize
from quintet.executor.gguf.types import GgmlType
from quintet.executor.ops.host_linear import WeightFormat
from quintet.executor.quant.numbers import Numbers

NUMBERS = {
    "Q8_0": Numbers(WeightFormat.INT8, 32),
    "Q4_0": Numbers(WeightFormat.INT4, 32),
    **{each.name: Numbers(each) for each in WeightFormat if each.has_own_group and each.block(0) is not None},
}
"""By the name of a type: what a packed weight has for it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a matrix as they lie in the file."""

    raw: torch.Tensor
    """uint8 ``[rows, bytes of a row]``."""
    kind: GgmlType

    def floats(self) -> torch.Tensor:
        """Return the numbers, fp32 ``[rows, depth]``."""
        count = self.raw.numel() // self.kind.block_bytes * self.kind.block
        whole = torch.empty(count)
        dequantize(self.raw.reshape(-1), self.kind, whole)
        return whole.view(len(self.raw), -1)
