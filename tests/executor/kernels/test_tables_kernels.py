"""Weights with lookup tables per output, and outliers: numbers, products, and rejected arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_tables import Outliers, fill_tables
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

DRAWS = torch.Generator().manual_seed(7)
SHAPES = [(1, 1), (63, 7), (70, 130), (140, 2300)]
"""The depth of the last one has several slices, and a partial word of codes."""


def kernels() -> LinearLibrary:
    library = linear_library()
    assert library is not None
    return library


def draw(columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and tables, each of 16 distinct numbers."""
    codes = torch.randint(0, 16, (columns, depth), generator=DRAWS, dtype=torch.uint8)
    return codes, torch.randn(columns, 16, generator=DRAWS) * 0.1


def draw_outliers(columns: int, depth: int, share: float, whole_row: bool = False) -> Outliers:
    places = torch.rand(columns, depth, generator=DRAWS) < share
    places[columns // 2] |= whole_row
    ends = torch.nn.functional.pad(places.sum(1).cumsum(0), (1, 0))
    return Outliers(ends, places.nonzero()[:, 1], torch.randn(int(ends[-1]), generator=DRAWS))


def numbers(codes: torch.Tensor, tables: torch.Tensor, outliers: Outliers | None) -> torch.Tensor:
    """Dequantize by the definition."""
    whole = torch.gather(tables, 1, codes.long())
    for row in range(len(codes) if outliers is not None else 0):
        assert outliers is not None
        for i in range(int(outliers.begins[row]), int(outliers.begins[row + 1])):
            whole[row, outliers.inputs[i]] += outliers.numbers[i]
    return whole


def packed(
    columns: int, depth: int, share: float, paired: bool = False, whole_row: bool = True
) -> tuple[PackedWeight, torch.Tensor]:
    """Return a weight filled in two parts, the last one first, and its numbers."""
    codes, tables = draw(columns, depth)
    outliers = draw_outliers(columns, depth, share, whole_row) if share else None
    count = 0 if outliers is None else len(outliers.inputs)
    weight = PackedWeight(kernels(), WeightFormat.TABLES, columns, depth, paired=paired, outliers=count)
    for part in (range(columns // 2, columns), range(columns // 2)):
        its = None if outliers is None else outliers.rows(part)
        cut = slice(part.start, part.stop)
        fill_tables(weight, codes[cut], tables[cut], its, first_column=part.start)
    return weight, numbers(codes, tables, outliers)


@pytest.mark.parametrize("share", [0.0, 0.02])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_of_tables(columns: int, depth: int, share: float) -> None:
    """Exact numbers; fp32 sums are off by at most their count of roundings, with the same bits for every number of rows."""
    weight, exact = packed(columns, depth, share)
    assert torch.equal(weight.read(), exact)
    x = torch.randn(70, depth, generator=DRAWS)
    whole = weight.linear(x)
    parts = exact.abs() + (1.0 if share else 0.0)  # a number and its outlier may nearly cancel
    error = (whole.double() - x.double() @ exact.double().T).abs()
    assert bool((error <= (depth + 4) * 2**-24 * (x.double().abs() @ parts.double().T) + 1e-30).all())
    for begin, end in ((0, 1), (5, 8), (3, 50), (60, 70)):
        assert torch.equal(weight.linear(x[begin:end]), whole[begin:end])
    narrow = weight.linear(x[:3].bfloat16())
    assert torch.equal(narrow, weight.linear(x[:3].bfloat16().float()).bfloat16())


@pytest.mark.parametrize(("columns", "depth"), [(140, 2300), (4700, 520)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12, 40])
def test_products_of_integers_are_exact(columns: int, depth: int, rows: int) -> None:
    """Small integers have exact sums in any order: every weight is multiplied by its own input."""
    codes, _ = draw(columns, depth)
    tables = torch.stack([torch.randperm(16, generator=DRAWS) - 8.0 for _ in range(columns)])
    drawn = draw_outliers(columns, depth, 0.01, whole_row=True)
    outliers = Outliers(drawn.begins, drawn.inputs, (drawn.numbers * 20).round())
    weight = PackedWeight(kernels(), WeightFormat.TABLES, columns, depth, outliers=len(outliers.inputs))
    fill_tables(weight, codes, tables, outliers)
    x = torch.randint(-9, 10, (rows, depth), generator=DRAWS).float()
    assert torch.equal(weight.linear(x), x @ numbers(codes, tables, outliers).T)


@pytest.mark.parametrize("columns", [70, 140])
def test_gates_and_ups(columns: int) -> None:
    weight, exact = packed(columns, 300, 0.02, paired=True)
    assert torch.equal(weight.read(), exact)
    x = torch.randn(50, 300, generator=DRAWS)
    out = weight.linear(x, activation=GatedActivation.SILU_AND_MUL)
    gates, ups = (x @ exact.T).split(columns // 2, 1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gates) * ups, rtol=1e-3, atol=1e-5)
    for begin, end in ((0, 1), (5, 8), (3, 50)):
        part = weight.linear(x[begin:end], activation=GatedActivation.SILU_AND_MUL)
        assert torch.equal(part, out[begin:end])


def test_bits_do_not_depend_on_threads() -> None:
    """With 40 threads, tasks are slices of inputs, of fewer columns."""
    library = open_library()
    assert library is not None
    set_threads = declare(library, "qt_set_threads", ctypes.c_int, ctypes.c_int)
    weight, _ = packed(200, 5000, 0.01)
    x, outputs = torch.randn(30, 5000, generator=DRAWS), []
    for count in (1, 2, 40):
        set_threads(count, 0)
        outputs += [torch.cat([weight.linear(x[:1]), weight.linear(x)[1:]])]
    set_threads(1, 0)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_refilled_columns_have_only_new_outliers() -> None:
    (codes, tables), first = draw(100, 600), draw_outliers(100, 600, 0.02)
    weight = PackedWeight(kernels(), WeightFormat.TABLES, 100, 600, outliers=2 * len(first.inputs))
    fill_tables(weight, codes, tables, first)
    again = draw_outliers(30, 600, 0.02)
    fill_tables(weight, codes[20:50], tables[20:50], again, first_column=20)
    expected = numbers(codes, tables, first)
    expected[20:50] = numbers(codes[20:50], tables[20:50], again)
    assert torch.equal(weight.read(), expected)
    fill_tables(weight, codes[:30], tables[:30])
    expected[:30] = numbers(codes[:30], tables[:30], None)
    assert torch.equal(weight.read(), expected)


def test_packed_bytes_are_mapped() -> None:
    weight, exact = packed(70, 300, 0.02)
    memory = torch.empty(len(weight.memory) + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: len(weight.memory)]
    memory.copy_(weight.memory)
    other = PackedWeight(kernels(), WeightFormat.TABLES, 70, 300, memory=memory, outliers=weight.outliers)
    assert torch.equal(other.read(), exact)


def test_invalid_tables_are_rejected() -> None:
    codes, tables = draw(64, 128)
    outliers = draw_outliers(64, 128, 0.01)
    count = len(outliers.inputs)
    weight = PackedWeight(kernels(), WeightFormat.TABLES, 64, 128, outliers=count)
    fill_tables(weight, codes, tables, outliers)
    begins, inputs, its = outliers.begins, outliers.inputs, outliers.numbers
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((codes | 16, tables), "0 to 15"),
        ((codes, tables / 0), "not finite"),
        ((codes[:, :127], tables), "codes are"),
        ((codes, tables[:, :8]), "tables are"),
        ((codes, tables.half()), "tables are"),
        ((codes[:63], tables[:63], outliers), "outliers have 64 rows"),
        ((codes, tables, Outliers(begins, inputs + 128, its)), "inputs must be below 128"),
        ((codes, tables, Outliers(begins, inputs - 128, its)), "inputs must be below 128"),
        ((codes, tables, Outliers(begins.flip(0), inputs, its)), "row pointers"),
        ((codes, tables, Outliers(begins, inputs, its / 0)), "not finite"),
        ((codes, tables, draw_outliers(64, 128, 0.5)), f"capacity for {count}"),
    ]
    for arguments, message in cases:
        with pytest.raises(PackedWeightError, match=message):
            fill_tables(weight, *arguments)
    for first in (-1, 1):
        with pytest.raises(PackedWeightError, match="columns"):
            fill_tables(weight, codes, tables, first_column=first)
    with pytest.raises(PackedWeightError, match="cannot quantize into TABLES"):
        weight.fill(torch.zeros(64, 128))
    with pytest.raises(PackedWeightError, match="cannot be filled from codes"):
        weight.fill_codes(codes, torch.ones(64, 1))
    with pytest.raises(PackedWeightError, match="8-bit activations"):
        weight.linear(torch.zeros(1, 128), inputs=Inputs.EIGHT_BITS)
    with pytest.raises(PackedWeightError, match="the weight is INT8; outliers need"):
        PackedWeight(kernels(), WeightFormat.INT8, 64, 128, outliers=1)
    with pytest.raises(PackedWeightError, match="with group 32"):
        PackedWeight(kernels(), WeightFormat.TABLES, 64, 128, group=32)
    with pytest.raises(PackedWeightError, match="2 leaves"):
        PackedWeight(kernels(), WeightFormat.TABLES, 64, 256, leaves=2)
    none = PackedWeight(kernels(), WeightFormat.TABLES, 64, 128)
    with pytest.raises(PackedWeightError, match="capacity for 0"):
        fill_tables(none, codes, tables, outliers)
    with pytest.raises(PackedWeightError, match="the weight is NF4; tables need"):
        fill_tables(PackedWeight(kernels(), WeightFormat.NF4, 64, 128, group=64), codes, tables)
