"""No quantization: weights stay in the model's number format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.backends.cpu.ops.linear import linear
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.packed import PackedLinear
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS, PackedFormat
from quintet.executor.checkpoints.quant.source import Rows, RowSource, floats_of
from quintet.executor.checkpoints.quant.stack import PackedStack, RowMajorStack, StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError


class Unquantized(Quantization):
    """See `quintet.executor.checkpoints.quant.method.Quantization`. Packs weights for the host kernels if those are
    available."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        """See `Quantization.linear`."""
        library = linear_library()
        if plan.device.type != "cpu" or library is None:
            return RowMajorLinear(shape, plan)
        return PackedLinear(library, shape, plan, PackedFormat(FLOAT_FORMATS[plan.dtype]))

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        """See `Quantization.stack`."""
        library = linear_library()
        if plan.device.type != "cpu" or library is None:
            return RowMajorStack(shape, plan)
        return PackedStack(library, shape, plan, PackedFormat(FLOAT_FORMATS[plan.dtype]))


class RowMajorLinear:
    """Row-major weight multiplied by torch: the reference, and the fallback without the host library."""

    packed = None
    runs = ()
    is_quantized = False

    def __init__(
        self, shape: LinearShape, plan: WeightPlan, sources: Sequence[RowSource] | None = None
    ) -> None:
        """sources: see `quintet.executor.checkpoints.quant.packed.PackedLinear`."""
        if shape.leaves > 1:
            raise ConfigError(
                "--layout-invariant needs Quintet's host kernels, which are not built: install a C++ compiler (g++ or"
                " clang++) and Quintet again, or drop the flag"
            )
        self._activation = shape.activation
        self.result_dtype = shape.result_dtype
        self.table = torch.empty((shape.columns, shape.depth), dtype=plan.dtype, device=plan.device)
        plan.num_bytes += self.table.nbytes
        first = 0
        for source in shape.sources if sources is None else sources:
            source.declare(plan, plan.expect, partial(self._fill, first))
            first += source.rows
        self.bias = plan.stacked(shape.biases) if shape.biased else None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearMethod.apply`."""
        return linear(x, self.table, self.bias, self._activation, self.result_dtype)

    def _fill(self, first: int, place: int, rows: Rows) -> None:
        floats = floats_of(rows)
        self.table[first + place : first + place + len(floats)].copy_(floats)
