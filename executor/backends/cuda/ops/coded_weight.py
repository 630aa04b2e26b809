"""A weight in codes of 4 or 8 bits as ``csrc/cuda/linear_coded.cu`` reads it: its layout, and how rows get there and back.

A number is ``(code - zero) * scale - minimum``, or a float of so many bits times a scale; neighbouring inputs of an output share
zero, scale and minimum. Nothing is rounded: codes are kept, scales and minima are fp32. Does not know where rows come from, nor
how they are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

STEP_DEPTH = 64
"""Inputs of a brick, and of a step of the kernel."""
BRICK_COLUMNS = 16
TILE_COLUMNS = 64
"""Columns are rounded up to these."""
RUNS = (64, 32, 16)
"""Inputs that are summed before they are scaled."""
ONE_GROUP = 30
"""The shift that takes every run of a row to group 0."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(StrEnum):
    """What codes are, by the names of csrc/cuda/codes.cuh."""

    INT4 = "Int4"
    INT8 = "Int8"
    FP8 = "Fp8"
    """e4m3."""
    FP4 = "Fp4"
    """e2m1."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self in (Code.INT4, Code.FP4) else 8

    @property
    def is_integer(self) -> bool:
        """Whether there are zero points."""
        return self in (Code.INT4, Code.INT8)


@dataclass(frozen=True)
class CodedLayout:
    """One weight's, or that of each of several alike."""

    code: Code
    columns: int
    depth: int
    group: int
    """Neighbouring inputs that share a scale, a multiple of 16; 0: all."""
    has_zeros: bool = False
    """Whether zero points differ."""
    has_minima: bool = False

    def __post_init__(self) -> None:
        assert self.group % RUNS[-1] == 0 and self.columns > 0 < self.depth, self
        assert self.code.is_integer or not (self.has_zeros or self.has_minima), self

    @property
    def zero(self) -> int:
        """The zero point of integers where all have one: the middle, or 0 where there are minima."""
        return 1 << (self.code.bits - 1) if self.code.is_integer and not self.has_minima else 0

    @property
    def width(self) -> int:
        """Columns, with those that fill the last tile."""
        return -(-self.columns // TILE_COLUMNS) * TILE_COLUMNS

    @property
    def steps(self) -> int:
        """Bricks of a column."""
        return -(-self.depth // STEP_DEPTH)

    @property
    def brick_bytes(self) -> int:
        """Of 16 columns and 64 inputs."""
        return BRICK_COLUMNS * STEP_DEPTH * self.code.bits // 8

    @property
    def run(self) -> int:
        """Inputs whose products are summed before they are scaled."""
        return next(run for run in RUNS if self.group % run == 0)

    @property
    def run_shift(self) -> int:
        """A run is 16 times this power of two."""
        return (self.run // 16).bit_length() - 1

    @cached_property
    def group_shift(self) -> int:
        """A kept group is this power of two of runs: a group itself, or a part of one that is no power of two."""
        runs = self.group // self.run
        return (runs & -runs).bit_length() - 1 if runs else ONE_GROUP

    @property
    def num_groups(self) -> int:
        """Of a column, as they are kept."""
        return ((self.steps * (STEP_DEPTH // self.run) - 1) >> self.group_shift) + 1

    @property
    def num_bytes(self) -> int:
        """Of one weight."""
        by_group = 4 * (1 + self.has_minima) + self.has_zeros
        return (
            self.width // BRICK_COLUMNS * self.steps * self.brick_bytes
            + self.num_groups * self.width * by_group
        )


class CodedWeight:
    """Memory for a weight, or for several alike (experts), that rows are put into."""

    def __init__(self, layout: CodedLayout, where: torch.device, count: int | None = None) -> None:
        """count: of weights; None for one, without a dimension for them."""
        self.layout = layout
        self.count = count
        lead = () if count is None else (count,)
        bricks = (layout.width // BRICK_COLUMNS, layout.steps, layout.brick_bytes)
        groups = (layout.num_groups, layout.width)
        self.codes = torch.zeros(*lead, *bricks, dtype=torch.uint8, device=where)
        self.scales = torch.zeros(*lead, *groups, device=where)
        self.zeros = (
            torch.zeros(*lead, *groups, dtype=torch.uint8, device=where) if layout.has_zeros else None
        )
        self.minima = torch.zeros(*lead, *groups, device=where) if layout.has_minima else None

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
        """Keep rows, from column ``first`` on: each once. index: which weight, of several.

        codes: uint8 ``[rows, depth]``; scales and minima: fp32 ``[rows, groups]``; zeros: uint8 ``[rows, groups]``.
        """
        layout, end = self.layout, first + len(codes)
        assert codes.dtype == torch.uint8 and codes.shape[1] == layout.depth and end <= layout.columns
        assert (zeros is not None) == layout.has_zeros and (minima is not None) == layout.has_minima
        if layout.code is Code.FP8 and bool(((codes & 0x7F) == 0x7F).any()):
            raise ValueError("a weight in fp8 is no number (NaN)")
        where = self.codes.device
        # Rows of one brick may come at different times: what is not there yet is zeros.
        above, below = first % BRICK_COLUMNS, -end % BRICK_COLUMNS
        beyond = layout.steps * STEP_DEPTH - layout.depth
        whole = torch.nn.functional.pad(codes.to(where), (0, beyond, above, below))
        bricks = self.codes if index is None else self.codes[index]
        bricks[first // BRICK_COLUMNS : (end + below) // BRICK_COLUMNS] |= _bricks(whole, layout)
        for kept, given in ((self.scales, scales), (self.zeros, zeros), (self.minima, minima)):
            if kept is not None and given is not None:
                into = kept if index is None else kept[index]
                into[:, first:end] = self._by_kept_group(given.to(where)).t()

    def floats(self, index: int | None = None) -> torch.Tensor:
        """Return the numbers, fp32 ``[columns, depth]``: the reference of what the kernel multiplies."""
        layout = self.layout
        codes = _codes(self.codes if index is None else self.codes[index], layout)
        scales, zeros, minima = (
            None if kept is None else self._spread(kept if index is None else kept[index])
            for kept in (self.scales, self.zeros, self.minima)
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

    def _by_kept_group(self, by_group: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, num_groups]``, the last of them repeated to the end of the last step."""
        layout = self.layout
        kept = layout.run << layout.group_shift
        if layout.group and layout.group != kept:
            by_group = by_group.repeat_interleave(layout.group // kept, dim=1)
        by_group = by_group[:, : layout.num_groups]
        missing = layout.num_groups - by_group.shape[1]
        return torch.cat((by_group, by_group[:, -1:].expand(-1, missing)), dim=1)

    def _spread(self, kept: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        by_run = kept.t()[: layout.columns]
        inputs = min(layout.run << layout.group_shift, layout.steps * STEP_DEPTH)
        return by_run.repeat_interleave(inputs, dim=1)[:, : layout.depth]


def _bricks(codes: torch.Tensor, layout: CodedLayout) -> torch.Tensor:
    """Return codes ``[columns, depth]``, both whole bricks, as ``[column bricks, steps, bytes of a brick]``.

    A column of a brick is 8 t + g, an input of it 16 s + 8 h + 2 q + e: lane 4 g + q has those of its g and q.
    """
    if layout.code.bits == 4:
        parts = codes.view(-1, 2, 8, layout.steps, 4, 2, 4, 2)  # brick, t, g, step, s, h, q, e
        nibbles = parts.permute(0, 3, 2, 6, 4, 7, 1, 5)  # brick, step, g, q, s, e, t, h
        return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(-1, layout.steps, layout.brick_bytes)
    parts = codes.view(-1, 2, 8, layout.steps, 2, 2, 2, 4, 2)  # brick, t, g, step, half of s, s, h, q, e
    return parts.permute(0, 3, 4, 2, 7, 5, 1, 6, 8).reshape(-1, layout.steps, layout.brick_bytes)


def _codes(bricks: torch.Tensor, layout: CodedLayout) -> torch.Tensor:
    """Return what `_bricks` was given, without what fills bricks: uint8 ``[columns, depth]``."""
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
