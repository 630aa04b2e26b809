"""Linear layers in the model's number format, or quantized while loading: row-major for torch, or on the host library's
packed weights.

The kernels of ``csrc/cpu`` quantize arriving rows; this module selects the format of each layer.

A layer with parts of different formats has one packed weight for each run of equal formats (`PackedRuns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import linear
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.fill import fill
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, PackedRun, Quantization
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS, LAYOUT, PackedFormat
from quintet.executor.checkpoints.quant.source import (
    CodedRows,
    Rows,
    RowSource,
    declare_order,
    declare_rows,
    floats_of,
    is_ordered,
    runs_of,
)
from quintet.executor.checkpoints.quant.stack import PackedStack, RowMajorStack, StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.checkpoints.weights.store import Description
from quintet.wire.errors import ConfigError


def library_for(plan: WeightPlan) -> LinearLibrary | None:
    """Return the host's library if it multiplies by the plan's weights; None if torch or a device does."""
    return linear_library() if plan.device.type == "cpu" else None


class Unquantized(Quantization):
    """See `quintet.executor.checkpoints.quant.method.Quantization`. Packs weights for the host kernels if those are
    available."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        library = library_for(plan)
        if library is None:
            return RowMajorLinear(shape, plan)
        return PackedLinear(library, shape, plan, PackedFormat(FLOAT_FORMATS[plan.dtype]))

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        library = library_for(plan)
        if library is None:
            return RowMajorStack(shape, plan)
        return PackedStack(library, shape, plan, PackedFormat(FLOAT_FORMATS[plan.dtype]))


class RowMajorLinear:
    """Row-major weight multiplied by torch: the reference, and the fallback without the host library. A `LinearMethod`."""

    packed = None
    runs = ()
    is_quantized = False

    def __init__(
        self, shape: LinearShape, plan: WeightPlan, sources: Sequence[RowSource] | None = None
    ) -> None:
        """sources: see `PackedLinear`."""
        if shape.leaves > 1:
            raise ConfigError(
                "--layout-invariant needs Quintet's host kernels, which are not built: install a C++ compiler (g++ or"
                " clang++) and Quintet again, or drop the flag"
            )
        self._activation = shape.activation
        self.result_dtype = shape.result_dtype
        self.table = torch.empty((shape.columns, shape.depth), dtype=plan.dtype, device=plan.device)
        plan.num_bytes += self.table.nbytes
        declare_rows(shape.sources if sources is None else sources, plan, plan.expect, self._fill)
        self.bias = plan.stacked(shape.biases) if shape.biased else None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.table, self.bias, self._activation, self.result_dtype)

    def _fill(self, first: int, rows: Rows) -> None:
        floats = floats_of(rows)
        self.table[first : first + len(floats)].copy_(floats)


class PackedQuantization(Quantization):
    """See `quintet.executor.checkpoints.quant.method.Quantization`."""

    def __init__(self, name: str, packed_format: PackedFormat, of_output_layer: PackedFormat) -> None:
        library = linear_library()
        if library is None:
            raise ConfigError(
                f"--quantization {name} needs Quintet's host kernels, which are not built: install a C++ compiler"
                " (g++ or clang++) and Quintet again, or drop the flag"
            )
        self._library = library
        self._packed_format = packed_format
        self._of_output_layer = of_output_layer

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        packed_format = self._of_output_layer if shape.is_output_layer else self._packed_format
        if shape.is_exact:
            packed_format = PackedFormat(FLOAT_FORMATS[plan.dtype])
        return PackedLinear(self._library, shape, plan, packed_format)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        packed_format = PackedFormat(FLOAT_FORMATS[plan.dtype]) if shape.is_exact else self._packed_format
        return PackedStack(self._library, shape, plan, packed_format)


def int8() -> PackedQuantization:
    """Return 8-bit weights with one scale for each output."""
    packed_format = PackedFormat(WeightFormat.INT8)
    return PackedQuantization("int8", packed_format, of_output_layer=packed_format)


def int4() -> PackedQuantization:
    """Return 4-bit weights with group size 128; the output layer has 8 bits (see ``docs/quantization.md``)."""
    return PackedQuantization(
        "int4", PackedFormat(WeightFormat.INT4, group=128), of_output_layer=PackedFormat(WeightFormat.INT8)
    )


def w8a8() -> PackedQuantization:
    """Return 8-bit weights with activations quantized to 8 bits, one scale for each token."""
    return PackedQuantization(
        "w8a8",
        PackedFormat(WeightFormat.INT8, inputs=Inputs.EIGHT_BITS),
        of_output_layer=PackedFormat(WeightFormat.INT8),
    )


class PackedLinear:
    """One layer, or a run of its columns. A `LinearMethod`, a `PackedRun`, and a `PackedStore` for its weight."""

    table = None

    def __init__(
        self,
        library: LinearLibrary,
        shape: LinearShape,
        plan: WeightPlan,
        packed_format: PackedFormat,
        sources: Sequence[RowSource] | None = None,
    ) -> None:
        """sources: sources of the weight, one for each part of the shape; None: the checkpoint stores it in floating
        point."""
        self._library = library
        self._shape = shape
        self._packed_format = packed_format
        self._sources = shape.sources if sources is None else sources
        self._packed: PackedWeight | None = None
        self._outliers = _outliers_of(self._sources) if packed_format.weight_format.has_tables else 0
        self.is_quantized = sources is None and not packed_format.weight_format.is_float
        self.inputs = packed_format.inputs
        self.num_bytes: int = shape.leaves * library.weight_bytes(
            *(int(packed_format.weight_format), shape.columns, shape.depth // shape.leaves),
            *(packed_format.group, bool(shape.activation)),
        )
        self.num_bytes += library.weight_outlier_bytes(
            shape.columns, shape.depth, bool(shape.activation), self._outliers
        )
        plan.store(self)
        declare_rows(self._sources, plan, plan.pack, self._fill)
        is_float = packed_format.weight_format.is_float
        self.order = None if is_float else declare_order(list(self._sources), shape.depth, plan)
        self.bias = plan.stacked(shape.biases) if shape.biased else None

    @property
    def packed(self) -> PackedWeight:
        """The packed weight; only after a loader has set its memory."""
        assert self._packed is not None, "used before it was loaded"
        return self._packed

    @property
    def runs(self) -> Sequence[PackedRun]:
        return (self,)

    @property
    def description(self) -> Description:
        return {
            "layer": "+".join(source.label for source in self._sources),
            "layout": LAYOUT,
            "format": self._packed_format.weight_format.name,
            "group": self._packed_format.group,
            "columns": self._shape.columns,
            "depth": self._shape.depth,
            "paired": bool(self._shape.activation),
            "leaves": self._shape.leaves,
            "outliers": self._outliers,
        }

    def open(self, memory: torch.Tensor) -> None:
        shape, packed_format = self._shape, self._packed_format
        self._packed = PackedWeight(
            self._library,
            packed_format.weight_format,
            shape.columns,
            shape.depth,
            group=packed_format.group,
            paired=bool(shape.activation),
            memory=memory,
            leaves=shape.leaves,
            cut_columns=shape.cut_columns,
            outliers=self._outliers,
        )

    def round_inputs(self) -> bool:
        self.inputs = self._packed_format.rounded_inputs
        return self.inputs is not Inputs.SIXTEEN_BITS

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearMethod.apply`. out: tensor for the result; None: a new one."""
        return self.packed.linear(
            x if self.order is None else x[:, self.order],
            self.bias,
            out=out,
            activation=self._shape.activation,
            inputs=self.inputs,
            result_dtype=self._shape.result_dtype,
        )

    def _fill(self, first_column: int, rows: Rows) -> None:
        fill(self.packed, rows, first_column)


def _outliers_of(sources: Sequence[RowSource]) -> int:
    """Return the maximum number of outliers; a tensor that several parts share counts once."""
    coded = [source for source in sources if isinstance(source, CodedRows)]
    return sum({source.part.name: source.scheme.outliers for source in coded}.values())


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
    runs = []
    for begin, end in runs_of(zip(packed_formats, map(is_ordered, sources), strict=True)):
        run = replace(shape, parts=shape.parts[begin:end])
        runs.append(PackedLinear(library, run, plan, packed_formats[begin], sources[begin:end]))
    return runs[0] if len(runs) == 1 else PackedRuns(runs, shape.result_dtype)
