"""Codes that choose from a table of each output on their way into packed weights, and outliers, which are added to some numbers.

Owns what `WeightFormat.TABLES` is filled with; the kernels are those of `quintet.executor.backends.cpu.ops.packed_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.ops.host_linear import CodesProblem
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError

TABLE_SIZE = 16
"""Numbers of a table; codes of fewer bits choose from the first of them."""


@dataclass(frozen=True, slots=True)
class Outliers:
    """What is added to numbers of rows that codes choose."""

    begins: torch.Tensor
    """int64 ``[rows + 1]``: which of them each row has."""
    inputs: torch.Tensor
    """int64 ``[count]``: the places in their rows; a place may have several."""
    numbers: torch.Tensor
    """fp32 ``[count]``."""

    def rows(self, some: range) -> Outliers:
        """Return those of some of the rows."""
        begins = self.begins[some.start : some.stop + 1]
        first, last = int(begins[0]), int(begins[-1])
        return Outliers(begins - first, self.inputs[first:last], self.numbers[first:last])

    def add_to(self, matrix: torch.Tensor) -> None:
        """Add them to their places in ``matrix [rows, depth]``."""
        places = torch.repeat_interleave(torch.arange(len(matrix)), self.begins.diff()), self.inputs
        matrix.index_put_(places, self.numbers, accumulate=True)


def fill_tables(
    weight: PackedWeight,
    codes: torch.Tensor,
    tables: torch.Tensor,
    outliers: Outliers | None = None,
    first_column: int = 0,
) -> None:
    """Pack ``codes [count, depth]``, uint8, into the columns from ``first_column`` on, as `WeightFormat.TABLES` has them.

    tables: float32 ``[count, 16]``. outliers: of these columns; None: there are none. `PackedWeight.read` gives
    ``tables[row, code]``, and outliers added to it in fp32; products have a term for each. Raises `PackedWeightError` for codes
    above 15, numbers that are not finite, and more outliers than the weight has room for.
    """
    count = codes.shape[0]
    if not weight.format.has_tables:
        raise PackedWeightError(f"tables for a {weight.format.name} weight: it has none")
    for name, tensor, dtype, shape in (
        ("codes", codes, torch.uint8, (count, weight.depth)),
        ("tables", tables, torch.float32, (count, TABLE_SIZE)),
    ):
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise PackedWeightError(
                f"{name} are {tensor.dtype}{list(tensor.shape)}; expected {dtype}{list(shape)}"
            )
    weight.check_columns(first_column, count)
    codes, tables = codes.contiguous(), tables.contiguous()
    problems = weight.library.weight_fill_tables(
        weight.handle, codes.data_ptr(), codes.stride(0), tables.data_ptr(), first_column, count
    )
    if problems & CodesProblem.CODE:
        raise PackedWeightError("codes of a table are 0 to 15; there are others")
    if problems & CodesProblem.SCALE:
        raise PackedWeightError("some numbers of tables are not finite")
    _fill_outliers(weight, outliers, first_column, count)


def _fill_outliers(weight: PackedWeight, outliers: Outliers | None, first_column: int, count: int) -> None:
    if outliers is None:
        nothing = torch.zeros(0)
        outliers = Outliers(torch.zeros(count + 1, dtype=torch.int64), nothing.long(), nothing)
    begins, inputs, numbers = outliers.begins, outliers.inputs, outliers.numbers
    kinds = [each.dtype for each in (begins, inputs, numbers)]
    if kinds != [torch.int64, torch.int64, torch.float32] or begins.shape != (count + 1,):
        raise PackedWeightError(
            f"outliers of {len(begins) - 1} rows in {kinds}; expected those of {count} in int64, int64 and float32"
        )
    its = len(inputs)
    if (
        int(begins[0]) != 0
        or int(begins[-1]) != its
        or bool((begins.diff() < 0).any())
        or len(numbers) != its
    ):
        raise PackedWeightError(
            f"rows do not divide {its} outliers, {len(numbers)} numbers, among themselves"
        )
    if not bool(numbers.isfinite().all()):
        raise PackedWeightError("some outliers are not finite")
    begins, inputs, numbers = begins.contiguous(), inputs.contiguous(), numbers.contiguous()
    arrays = (each.data_ptr() for each in (begins, inputs, numbers))
    if not weight.library.weight_fill_outliers(weight.handle, first_column, count, *arrays):
        raise PackedWeightError(
            f"{its} outliers besides those of other columns, of a weight that has room for {weight.outliers}, {weight.depth} deep"
        )
