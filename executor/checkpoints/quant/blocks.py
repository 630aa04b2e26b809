"""Rows of GGUF blocks, and their packed formats on the host; nothing is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.gguf.blocks.bits import bits_of
from quintet.executor.checkpoints.gguf.blocks.dequantize import INTEGERS, Integers, dequantize
from quintet.executor.checkpoints.gguf.types import GgmlType
from quintet.executor.checkpoints.quant.packed_formats import PackedFormat

PACKED_FORMATS = {
    "Q8_0": PackedFormat(WeightFormat.INT8, 32),
    "Q4_0": PackedFormat(WeightFormat.INT4, 32),
    **{
        each.name: PackedFormat(each)
        for each in WeightFormat
        if each.has_own_group and each.block(0) is not None
    },
}
"""Packed format by the name of a GGUF type."""


_AT_A_TIME = 4 << 20
"""Values at a time: 16 MB as fp32, enough work for all threads."""


def read_blocks(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Dequantize rows of blocks, uint8 ``[rows, bytes of a row]``, into ``out [rows, depth]`` of any floating-point
    format.

    Uses the host's kernels if they support the type: a quarter of torch's time, same bits.
    """
    library, packed_format = linear_library(), PACKED_FORMATS.get(kind.name)
    if library is None or packed_format is None or raw.device.type != "cpu":
        dequantize(raw.reshape(-1), kind, out.view(-1))
        return
    rows, depth = out.shape
    step = max(1, _AT_A_TIME // depth)
    group = 0 if packed_format.weight_format.has_own_group else packed_format.group
    packed = PackedWeight(library, packed_format.weight_format, min(step, rows), depth, group=group)
    for begin in range(0, rows, step):
        some = raw[begin : begin + step]
        packed.fill_blocks(some)
        out[begin : begin + step] = packed.read(0, len(some))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a matrix as stored in the file."""

    raw: torch.Tensor
    """uint8 ``[rows, bytes of a row]``."""
    kind: GgmlType

    def integers(self) -> Integers:
        """Return codes, scales and minima of rows; the type is one of `INTEGERS`, or MXFP4 (codes are floats)."""
        blocks = self.raw.reshape(-1, self.kind.block_bytes)
        if self.kind.name == "MXFP4":
            ones = torch.ones(len(blocks), 1, device=blocks.device)
            its = Integers(bits_of(blocks[:, 1:], 16, 4), 0, torch.ldexp(ones, blocks[:, :1].int() - 127))
        else:
            its = INTEGERS[self.kind.name](blocks)
        rows = len(self.raw)
        minima = None if its.minima is None else its.minima.view(rows, -1)
        return Integers(its.codes.reshape(rows, -1), its.zero, its.scales.view(rows, -1), minima)

    def floats(self) -> torch.Tensor:
        """Return the dequantized values, fp32 ``[rows, depth]``."""
        whole = torch.empty(len(self.raw), self.raw.shape[1] // self.kind.block_bytes * self.kind.block)
        read_blocks(self.raw, self.kind, whole)
        return whole
