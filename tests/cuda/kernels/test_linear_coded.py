"""Products with coded weights, against fp64 and between batches, on shapes that straddle tiles, bricks and groups.

Bounds are those of `tests.cuda.kernels.test_linear`: values of codes are exact. A scale is applied in the rounding of an
addition counted there. All other comparisons are equalities.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.kernels.references import grouped_matmul_reference
from tests.cuda.kernels.test_linear import HALF_UNIT, GridRecorder, noise, same

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.coded_weight import Code, CodedLayout, CodedWeight
from quintet.executor.backends.cuda.ops.linear import OperandError, SplitMemory
from quintet.executor.backends.cuda.ops.linear_coded import (
    TILES,
    coded_grouped_matmul,
    coded_matmul,
    coded_matmul_reference,
)
from quintet.executor.backends.cuda.ops.linear_groups import tiles_of_groups

DTYPES = (torch.bfloat16, torch.float16)
COLUMNS, DEPTH = 72, 2 * 256 + 24
"""A full tile and a partial tile of columns; chunks with a partial step at the end."""

LAYOUTS = {
    "4 bits, groups of 128": CodedLayout(Code.INT4, COLUMNS, DEPTH, 128),
    "4 bits with zeros, groups of 32": CodedLayout(Code.INT4, COLUMNS, DEPTH, 32, has_zeros=True),
    "4 bits with minima, groups of 32": CodedLayout(Code.INT4, COLUMNS, DEPTH, 32, has_minima=True),
    "8 bits, one group": CodedLayout(Code.INT8, COLUMNS, DEPTH, 0),
    "8 bits, groups of 16": CodedLayout(Code.INT8, COLUMNS, DEPTH, 16),
    "8 bits with zeros, groups of 96": CodedLayout(Code.INT8, COLUMNS, DEPTH, 96, has_zeros=True),
    "8 bits with minima, groups of 32": CodedLayout(Code.INT8, COLUMNS, DEPTH, 32, has_minima=True),
    "fp8, blocks of 128": CodedLayout(Code.FP8, COLUMNS, DEPTH, 128),
    "fp4, groups of 32": CodedLayout(Code.FP4, COLUMNS, DEPTH, 32),
}
every_format = pytest.mark.parametrize("dtype", DTYPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@dataclass(frozen=True, slots=True)
class Rows:
    """The tensors of a weight in a checkpoint, and its numbers."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    minima: torch.Tensor | None

    @classmethod
    def draw(cls, layout: CodedLayout, seed: int = 0) -> Rows:
        """Draw every code that is a number, also the largest and the smallest."""
        random = torch.Generator().manual_seed(seed)
        levels, groups = 1 << layout.code.bits, -(-layout.depth // (layout.group or layout.depth))
        shape, by_group = (layout.columns, layout.depth), (layout.columns, groups)
        codes = torch.randint(0, levels, shape, generator=random, dtype=torch.uint8)
        if layout.code is Code.FP8:
            codes[codes & 0x7F == 0x7F] = 0x7E
        return cls(
            codes,
            torch.rand(by_group, generator=random) * 0.1 + 0.001,
            torch.randint(0, levels, by_group, generator=random, dtype=torch.uint8)
            if layout.has_zeros
            else None,
            torch.rand(by_group, generator=random) if layout.has_minima else None,
        )

    def numbers(self, layout: CodedLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers in fp64, and bounds of their terms: ``[columns, depth]``."""
        group = torch.arange(layout.depth) // (layout.group or layout.depth)
        if layout.code is Code.FP8:
            values = self.codes.view(torch.float8_e4m3fn).double()
        elif layout.code is Code.FP4:
            value = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
            values = torch.tensor(value + [-each for each in value], dtype=torch.float64)[self.codes.int()]
        else:
            zero = 0 if layout.has_minima else 1 << (layout.code.bits - 1)
            values = self.codes.double() - (zero if self.zeros is None else self.zeros[:, group].double())
        scaled = values * self.scales[:, group].double()
        least = torch.zeros(()) if self.minima is None else self.minima[:, group].double()
        return scaled - least, scaled.abs() + least

    def on(self, device: Device, layout: CodedLayout, cuts: tuple[int, ...] = ()) -> CodedWeight:
        """Return the packed weight; cuts: boundaries of the rows put separately."""
        weight = CodedWeight(layout, device.torch_device)
        for begin, end in zip((0, *cuts), (*cuts, layout.columns), strict=True):
            some = (None if each is None else each[begin:end] for each in (self.zeros, self.minima))
            weight.put(begin, self.codes[begin:end], self.scales[begin:end], *some)
        return weight


def check(
    y: torch.Tensor, x: torch.Tensor, rows: Rows, layout: CodedLayout, bias: torch.Tensor | None
) -> None:
    numbers, magnitudes = rows.numbers(layout)
    shift = torch.zeros(layout.columns, dtype=torch.float64) if bias is None else bias.double().cpu()
    exact = x.double().cpu() @ numbers.T + shift
    slack = (layout.depth + 8) * 2.0**-22 * (x.double().cpu().abs() @ magnitudes.T + shift.abs())
    bound = 1.01 * (slack + HALF_UNIT[y.dtype] * (exact.abs() + slack))
    error = (y.double().cpu() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


@every_layout
def test_rows_read_back_unchanged(layout: CodedLayout, device: Device) -> None:
    """A whole write and partial writes that share bricks give the same bytes, and the checkpoint's values."""
    rows = Rows.draw(layout)
    weight, cut = rows.on(device, layout), rows.on(device, layout, (3, 20, 64))
    assert torch.equal(weight.codes, cut.codes) and torch.equal(weight.scales, cut.scales)
    numbers, magnitudes = rows.numbers(layout)
    difference = (weight.floats().cpu().double() - numbers).abs()
    assert bool((difference <= magnitudes * 2.0**-23).all()), "two roundings in fp32"
    held = (weight.codes, weight.scales, weight.zeros, weight.minima)
    assert layout.num_bytes == sum(each.nbytes for each in held if each is not None)


@pytest.mark.drawn(5)
@every_format
@every_layout
def test_products(layout: CodedLayout, dtype: torch.dtype, device: Device) -> None:
    rows = Rows.draw(layout)
    weight = rows.on(device, layout)
    x, bias = noise(device, dtype, 17, DEPTH), noise(device, dtype, COLUMNS, seed=2)
    y = coded_matmul(device, x, weight, bias)
    check(y, x, rows, layout, bias)
    sums = coded_matmul(device, x, weight, bias, torch.empty(17, COLUMNS, device=device.torch_device))
    assert torch.equal(sums.to(dtype), y) and not torch.equal(sums, y.float())
    torch.testing.assert_close(
        y, coded_matmul_reference(x, weight, bias), rtol=2 * HALF_UNIT[dtype], atol=1e-2
    )
    check(coded_matmul(device, x[:1], weight, memory=SplitMemory(device)), x[:1], rows, layout, None)


@pytest.mark.drawn(1)
@every_format
@pytest.mark.parametrize("name", ["4 bits with zeros, groups of 32", "8 bits with minima, groups of 32"])
def test_bits_depend_on_the_row_and_the_weight_only(name: str, dtype: torch.dtype, device: Device) -> None:
    """Not on the other rows, the tile or the split, which resets the tickets."""
    layout = LAYOUTS[name]
    weight, x = Rows.draw(layout).on(device, layout), noise(device, dtype, 37, DEPTH)
    whole = coded_matmul(device, x, weight)
    watched, memory = GridRecorder(device), SplitMemory(device)
    for tile in TILES:
        for first, end in ((0, 37), (5, 6)):
            some = x[first:end]
            assert same(coded_matmul(watched, some, weight, tile=tile), whole[first:end]), tile
            assert same(coded_matmul(watched, some, weight, tile=tile, memory=memory), whole[first:end]), tile
    assert not memory.tickets.any()
    assert {grid[1] for grid in watched.grids} == {1, 3}


@every_format
def test_numbers_out_of_bounds_are_not_read(dtype: torch.dtype, device: Device) -> None:
    """NaN after the rows and the depth of x, and in a wider result."""
    layout = CodedLayout(Code.INT4, 9, 80, 16, has_zeros=True)
    rows = Rows.draw(layout)
    x = torch.full((6, 96), torch.nan, dtype=dtype, device=device.torch_device)
    x[:5, :80] = noise(device, dtype, 5, 80)
    wide = torch.full((5, 13), 7.0, dtype=dtype, device=device.torch_device)
    y = coded_matmul(device, x[:5, :80], rows.on(device, layout), out=wide[:, 2:11])
    assert y.data_ptr() == wide[:, 2:].data_ptr()
    check(y, x[:5, :80], rows, layout, None)
    assert bool((wide[:, :2] == 7).all()) and bool((wide[:, 11:] == 7).all())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("biased", [False, True])
@every_format
def test_rows_in_groups(dtype: torch.dtype, biased: bool, device: Device) -> None:
    """For each tile size, results equal the reference, and have the bits of each group computed alone."""
    counts, layout = [0, 3, 17, 1, 0], CodedLayout(Code.FP4, 72, 96, 32)
    ends = torch.tensor(counts, device=device.torch_device).cumsum(0)
    weight = CodedWeight(layout, device.torch_device, count=len(counts))
    alone: list[torch.Tensor] = []
    x = noise(device, dtype, sum(counts), layout.depth)
    bias = noise(device, dtype, len(counts), layout.columns, seed=2) if biased else None
    begin = 0
    for group, count in enumerate(counts):
        rows = Rows.draw(layout, seed=group)
        weight.put(0, rows.codes, rows.scales, index=group)
        its = rows.on(device, layout)
        alone.append(
            coded_matmul(device, x[begin : begin + count], its, None if bias is None else bias[group])
        )
        begin += count
    expected = grouped_matmul_reference(x, ends, weight.floats, bias)
    for tile in TILES:
        tiles = tiles_of_groups(ends, len(x), tile.rows)
        y = coded_grouped_matmul(device, x, tiles, tile, weight, bias)
        torch.testing.assert_close(y, expected, rtol=2 * HALF_UNIT[dtype], atol=1e-2)
        assert same(y, torch.cat(alone)), tile


def test_matrices_are_loaded_without_bank_conflicts(device: Device) -> None:
    if not isinstance(device, EmulatedDevice):
        pytest.skip("the emulator counts them")
    layout = LAYOUTS["4 bits, groups of 128"]
    weight, x = Rows.draw(layout).on(device, layout), noise(device, torch.bfloat16, 37, DEPTH)
    for tile in TILES:
        coded_matmul(device, x, weight, tile=tile)
        loads, conflicts = device.matrix_loads
        assert loads > 0 and conflicts == 0, tile


def test_unsupported_inputs_are_named(device: Device) -> None:
    layout = CodedLayout(Code.FP8, 8, 64, 0)
    rows = Rows.draw(layout)
    weight = rows.on(device, layout)
    x = noise(device, torch.bfloat16, 5, 64)
    with pytest.raises(
        OperandError, match=r"torch.float32\[5, 64\]; expected torch.bfloat16 or torch.float16"
    ):
        coded_matmul(device, x.float(), weight)
    with pytest.raises(OperandError, match=r"expected .* \[num_rows, 64\]"):
        coded_matmul(device, x[:, :56], weight)
    with pytest.raises(OperandError, match="one weight per group"):
        coded_grouped_matmul(device, x, torch.zeros(3, 1, dtype=torch.int32), TILES[0], weight)
    with pytest.raises(ValueError, match="NaN"):
        CodedWeight(layout, device.torch_device).put(0, torch.full_like(rows.codes, 0xFF), rows.scales)
    assert coded_matmul(device, x[:0], weight).shape == (0, 8)
