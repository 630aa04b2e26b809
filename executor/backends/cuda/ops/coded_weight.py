"""Quantized weight with 4- or 8-bit codes in the layout of ``csrc/cuda/linear_coded.cu``.

An element is ``(code - zero) * scale - minimum`` for integers, or a small float times a scale. The inputs of a group share zero
point, scale and minimum. Packing does not round: codes are kept, and scales and minima are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

STEP_DEPTH = 64
"""Inputs of a brick, which is also one step of the kernel."""
BRICK_COLUMNS = 16
TILE_COLUMNS = 64
"""Columns are padded to a multiple of this."""
RUNS = (64, 32, 16)
"""Possible numbers of inputs that are summed before scaling."""
ONE_GROUP = 30
"""Shift that maps every run of a row to group 0."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(StrEnum):
    """Type of the codes; names of csrc/cuda/codes.cuh."""

    INT4 = "Int4"
    INT8 = "Int8"
    FP8 = "Fp8"
    """e4m3."""
    FP4 = "Fp4"
    """e2m1."""

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self in (Code.INT4, Code.FP4) else 8

    @property
    def is_integer(self) -> bool:
        """True if codes are integers with a zero point."""
        return self in (Code.INT4, Code.INT8)


@dataclass(frozen=True)
class CodedLayout:
    """Layout of one weight, or of each of several equal ones."""

    code: Code
    columns: int
    depth: int
    group: int
    """Number of adjacent inputs per scale, a multiple of 16; 0: all inputs."""
    has_zeros: bool = False
    """True if each group has its own zero point."""
    has_minima: bool = False

    def __post_init__(self) -> None:
        assert self.group % RUNS[-1] == 0 and self.columns > 0 < self.depth, self
        assert self.code.is_integer or not (self.has_zeros or self.has_minima), self

    @property
    def zero(self) -> int:
        """Common zero point of integers: the middle of the range, or 0 with minima."""
        return 1 << (self.code.bits - 1) if self.code.is_integer and not self.has_minima else 0

    @property
    def width(self) -> int:
        """Number of columns with padding."""
        return -(-self.columns // TILE_COLUMNS) * TILE_COLUMNS

    @property
    def steps(self) -> int:
        """Number of bricks along the depth."""
        return -(-self.depth // STEP_DEPTH)

    @property
    def brick_bytes(self) -> int:
        """Bytes of a brick of 16 columns and 64 inputs."""
        return BRICK_COLUMNS * STEP_DEPTH * self.code.bits // 8

    @property
    def run(self) -> int:
        """Number of inputs that are summed before scaling."""
        return next(run for run in RUNS if self.group % run == 0)

    @property
    def run_shift(self) -> int:
        """Base-2 logarithm of ``run / 16``."""
        return (self.run // 16).bit_length() - 1

    @cached_property
    def group_shift(self) -> int:
        """Base-2 logarithm of the runs per stored group: a group, or a power-of-two part of it."""
        runs = self.group // self.run
        return (runs & -runs).bit_length() - 1 if runs else ONE_GROUP

    @property
    def num_groups(self) -> int:
        """Number of stored groups of a column."""
        return ((self.steps * (STEP_DEPTH // self.run) - 1) >> self.group_shift) + 1

    @property
    def num_bytes(self) -> int:
        """Bytes of one weight."""
        by_group = 4 * (1 + self.has_minima) + self.has_zeros
        return (
            self.width // BRICK_COLUMNS * self.steps * self.brick_bytes
            + self.num_groups * self.width * by_group
        )


class CodedWeight:
    """Memory of one weight, or of several equal ones (experts)."""

    def __init__(self, layout: CodedLayout, torch_device: torch.device, count: int | None = None) -> None:
        """count: number of weights; None: one weight without a leading dimension."""
        self.layout = layout
        self.count = count
        lead = () if count is None else (count,)
        bricks = (layout.width // BRICK_COLUMNS, layout.steps, layout.brick_bytes)
        groups = (layout.num_groups, layout.width)
        self.codes = torch.zeros(*lead, *bricks, dtype=torch.uint8, device=torch_device)
        self.scales = torch.zeros(*lead, *groups, device=torch_device)
        self.zeros = (
            torch.zeros(*lead, *groups, dtype=torch.uint8, device=torch_device) if layout.has_zeros else None
        )
        self.minima = torch.zeros(*lead, *groups, device=torch_device) if layout.has_minima else None

    def put(
        self,
        first: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        minima: torch.Tensor | None = None,
        *,
        index: int | None = None,
    ) -> None:
        """Store rows from column ``first``; each column may be stored once. index: of the weight, if there are several.

        codes: uint8 ``[rows, depth]``; scales and minima: fp32 ``[rows, groups]``; zeros: uint8 ``[rows, groups]``.
        """
        layout, end = self.layout, first + len(codes)
        assert codes.dtype == torch.uint8 and codes.shape[1] == layout.depth and end <= layout.columns
        assert (zeros is not None) == layout.has_zeros and (minima is not None) == layout.has_minima
        if layout.code is Code.FP8 and bool(((codes & 0x7F) == 0x7F).any()):
            raise ValueError("some fp8 codes are NaN")
        torch_device = self.codes.device
        # The rows of one brick may be stored in several calls; missing rows are zeros.
        above, below = first % BRICK_COLUMNS, -end % BRICK_COLUMNS
        beyond = layout.steps * STEP_DEPTH - layout.depth
        whole = torch.nn.functional.pad(codes.to(torch_device), (0, beyond, above, below))
        bricks = self.codes if index is None else self.codes[index]
        bricks[first // BRICK_COLUMNS : (end + below) // BRICK_COLUMNS] |= _bricks(whole, layout)
        for stored, values in ((self.scales, scales), (self.zeros, zeros), (self.minima, minima)):
            if stored is not None and values is not None:
                target = stored if index is None else stored[index]
                target[:, first:end] = self._by_stored_group(values.to(torch_device)).t()

    def floats(self, index: int | None = None) -> torch.Tensor:
        """Return the dequantized weight, fp32 ``[columns, depth]``: the reference of the kernel."""
        layout = self.layout
        codes = _codes(self.codes if index is None else self.codes[index], layout)
        scales, zeros, minima = (
            None if stored is None else self._spread(stored if index is None else stored[index])
            for stored in (self.scales, self.zeros, self.minima)
        )
        assert scales is not None
        match layout.code:
            case Code.FP8:
                numbers = codes.view(torch.float8_e4m3fn).float()
            case Code.FP4:
                table = torch.tensor((*E2M1, *(-each for each in E2M1)), device=codes.device)
                numbers = table[codes.int()]
            case _:
                numbers = codes.float() - (layout.zero if zeros is None else zeros.float())
        numbers = numbers * scales
        return numbers if minima is None else numbers - minima

    def _by_stored_group(self, by_group: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, num_groups]``; the last group is repeated to the end of the last step."""
        layout = self.layout
        stored = layout.run << layout.group_shift
        if layout.group and layout.group != stored:
            by_group = by_group.repeat_interleave(layout.group // stored, dim=1)
        by_group = by_group[:, : layout.num_groups]
        missing = layout.num_groups - by_group.shape[1]
        return torch.cat((by_group, by_group[:, -1:].expand(-1, missing)), dim=1)

    def _spread(self, stored: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        by_run = stored.t()[: layout.columns]
        inputs = min(layout.run << layout.group_shift, layout.steps * STEP_DEPTH)
        return by_run.repeat_interleave(inputs, dim=1)[:, : layout.depth]


def _bricks(codes: torch.Tensor, layout: CodedLayout) -> torch.Tensor:
    """Pack codes ``[columns, depth]``, both multiples of a brick, as ``[column bricks, steps, bytes of a brick]``.

    Within a brick, column = 8 t + g and input = 16 s + 8 h + 2 q + e; lane 4 g + q owns the elements of its g and q.
    """
    if layout.code.bits == 4:
        parts = codes.view(-1, 2, 8, layout.steps, 4, 2, 4, 2)  # brick, t, g, step, s, h, q, e
        nibbles = parts.permute(0, 3, 2, 6, 4, 7, 1, 5)  # brick, step, g, q, s, e, t, h
        return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(-1, layout.steps, layout.brick_bytes)
    parts = codes.view(-1, 2, 8, layout.steps, 2, 2, 2, 4, 2)  # brick, t, g, step, half of s, s, h, q, e
    return parts.permute(0, 3, 4, 2, 7, 5, 1, 6, 8).reshape(-1, layout.steps, layout.brick_bytes)


def _codes(bricks: torch.Tensor, layout: CodedLayout) -> torch.Tensor:
    """Unpack `_bricks`, without padding: uint8 ``[columns, depth]``."""
    if layout.code.bits == 4:
        octets = bricks.view(-1, layout.steps, 8, 4, 4, 2, 2)
        nibbles = torch.stack((octets & 15, octets >> 4), dim=-1)  # brick, step, g, q, s, e, t, h
        parts = nibbles.permute(0, 6, 2, 1, 4, 7, 3, 5)
    else:
        octets = bricks.view(
            -1, layout.steps, 2, 8, 4, 2, 2, 2, 2
        )  # brick, step, half of s, g, q, s, t, h, e
        parts = octets.permute(0, 6, 3, 1, 2, 5, 7, 4, 8)
    whole = parts.reshape(layout.width, layout.steps * STEP_DEPTH)
    return whole[: layout.columns, : layout.depth].contiguous()
