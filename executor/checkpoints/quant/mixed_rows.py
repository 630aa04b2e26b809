"""Linear layers with parts of different formats: one packed weight for each run of equal formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from quintet.executor.backends.cpu.ops.host_linear import LinearLibrary
from quintet.executor.checkpoints.quant.input_order import is_ordered
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.packed import PackedLinear
from quintet.executor.checkpoints.quant.packed_formats import PackedFormat
from quintet.executor.checkpoints.quant.source import RowSource
from quintet.executor.checkpoints.weights.plan import WeightPlan


class PackedRuns:
    """Packed weights of adjacent columns. A `LinearMethod`."""

    packed = None
    table = None
    bias = None
    is_quantized = False

    def __init__(self, runs: Sequence[PackedLinear], result_dtype: torch.dtype | None) -> None:
        self.runs = runs
        self._result_dtype = result_dtype

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        widths = [run.packed.columns for run in self.runs]
        y = x.new_empty(len(x), sum(widths), dtype=self._result_dtype)
        for run, columns in zip(self.runs, y.split(widths, dim=1), strict=True):
            run.apply(x, out=columns)
        return y


def packed_by_part(
    library: LinearLibrary,
    shape: LinearShape,
    plan: WeightPlan,
    packed_formats: Sequence[PackedFormat],
    sources: Sequence[RowSource],
) -> LinearMethod:
    """Return the owner of a layer with parts of these formats and sources, one each. Not for fused gate and up."""
    assert not shape.activation, "a gate and its up are of one weight"
    runs, first = [], 0
    kinds = zip(packed_formats, map(is_ordered, sources), strict=True)
    for (run_format, _), equal in groupby(kinds):
        end = first + len(list(equal))
        run = replace(shape, parts=shape.parts[first:end])
        runs.append(PackedLinear(library, run, plan, run_format, sources[first:end]))
        first = end
    return runs[0] if len(runs) == 1 else PackedRuns(runs, shape.result_dtype)
