"""Fills packed weights of `WeightFormat.TABLES`: codes into a lookup table per output, and outliers added to some elements.

The kernels are those of `quintet.executor.backends.cpu.ops.packed_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cpu.ops.host_linear import CodesProblem
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError, check_tensor

TABLE_SIZE = 16
"""Entries of a table; codes of fewer bits use the first ones."""


@dataclass(frozen=True, slots=True)
class Outliers:
    """Sparse values added to the decoded weight, in CSR form."""

    begins: torch.Tensor
    """int64 ``[rows + 1]``: row pointers."""
    inputs: torch.Tensor
    """int64 ``[count]``: column of each value; duplicates add up."""
    numbers: torch.Tensor
    """fp32 ``[count]``."""

    def rows(self, selected: range) -> Outliers:
        """Return the outliers of the selected rows."""
        begins = self.begins[selected.start : selected.stop + 1]
        first, last = int(begins[0]), int(begins[-1])
        return Outliers(begins - first, self.inputs[first:last], self.numbers[first:last])

    def add_to(self, matrix: torch.Tensor) -> None:
        """Add the values to ``matrix [rows, depth]`` in place."""
        places = torch.repeat_interleave(torch.arange(len(matrix)), self.begins.diff()), self.inputs
        matrix.index_put_(places, self.numbers, accumulate=True)


def fill_tables(
    weight: PackedWeight,
    codes: torch.Tensor,
    tables: torch.Tensor,
    outliers: Outliers | None = None,
    first_column: int = 0,
) -> None:
    """Pack uint8 ``codes [count, depth]`` into the columns from ``first_column`` of a `WeightFormat.TABLES` weight.

    tables: float32 ``[count, 16]``. outliers: of these columns, or None. `PackedWeight.read` returns ``tables[row, code]`` plus
    the outliers in fp32; a product has one term for each. Raises `PackedWeightError` for codes above 15, values that are not
    finite, and more outliers than the weight's capacity.
    """
    count = codes.shape[0]
    if not weight.format.has_tables:
        raise PackedWeightError(f"the weight is {weight.format.name}; tables need a weight of format TABLES")
    check_tensor("codes are", codes, torch.uint8, (count, weight.depth))
    check_tensor("tables are", tables, torch.float32, (count, TABLE_SIZE))
    weight.check_columns(first_column, count)
    codes, tables = codes.contiguous(), tables.contiguous()
    problems = weight.library.weight_fill_tables(
        weight.handle, codes.data_ptr(), codes.stride(0), tables.data_ptr(), first_column, count
    )
    if problems & CodesProblem.CODE:
        raise PackedWeightError("some codes are above 15; table codes are 0 to 15")
    if problems & CodesProblem.SCALE:
        raise PackedWeightError("some table values are not finite")
    _fill_outliers(weight, outliers, first_column, count)


def _fill_outliers(weight: PackedWeight, outliers: Outliers | None, first_column: int, count: int) -> None:
    if outliers is None:
        empty = torch.zeros(0)
        outliers = Outliers(torch.zeros(count + 1, dtype=torch.int64), empty.long(), empty)
    begins, inputs, numbers = outliers.begins, outliers.inputs, outliers.numbers
    kinds = [each.dtype for each in (begins, inputs, numbers)]
    if kinds != [torch.int64, torch.int64, torch.float32] or begins.shape != (count + 1,):
        raise PackedWeightError(
            f"outliers have {len(begins) - 1} rows and dtypes {kinds}; expected {count} rows in int64, int64 and float32"
        )
    num_outliers = len(inputs)
    if (
        int(begins[0]) != 0
        or int(begins[-1]) != num_outliers
        or bool((begins.diff() < 0).any())
        or len(numbers) != num_outliers
    ):
        raise PackedWeightError(
            f"the row pointers of the outliers do not fit {num_outliers} columns and {len(numbers)} values; they must start"
            " at 0, not decrease, and end at the count"
        )
    if not bool(numbers.isfinite().all()):
        raise PackedWeightError("some outliers are not finite")
    begins, inputs, numbers = begins.contiguous(), inputs.contiguous(), numbers.contiguous()
    arrays = (each.data_ptr() for each in (begins, inputs, numbers))
    if not weight.library.weight_fill_outliers(weight.handle, first_column, count, *arrays):
        raise PackedWeightError(
            f"{num_outliers} outliers do not fit: the weight has capacity for {weight.outliers} in all columns, and the"
            f" inputs must be below {weight.depth}"
        )
