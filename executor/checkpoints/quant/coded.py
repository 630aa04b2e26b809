"""Linear layers on a device with kernels that multiply codes: the checkpoint's codes stay unchanged, without rounding.

Supported rows: integers of up to 8 bits, fp8 (e4m3) and fp4 (e2m1) with group sizes that are multiples of 16. Other
rows of the same layer are rounded to the model's number format. The reference multiplies dequantized weights with
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quintet.executor.backends.cpu.ops.activation import activate
from quintet.executor.backends.cpu.ops.host_linear import Inputs
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cuda.ops.coded_weight import (
    BRICK_COLUMNS,
    RUNS,
    Code,
    CodedLayout,
    CodedWeight,
)
from quintet.executor.backends.cuda.ops.linear_coded import SUFFIXES, coded_matmul_reference
from quintet.executor.backends.cuda.ops.linear_fp8 import FP8, fp8_matmul_reference
from quintet.executor.backends.cuda.ops.linear_fp8 import PACK as FP8_PACK
from quintet.executor.checkpoints.quant.blocks import Blocks
from quintet.executor.checkpoints.quant.decode import Coded
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.quant.source import (
    MOST_CODES,
    Rows,
    RowSource,
    declare_order,
    declare_rows,
    is_ordered,
    runs_of,
    sorted_inputs,
)
from quintet.executor.checkpoints.quant.stack import StackMethod, StackShape, bias_of
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError

PACK_INPUTS = 8
"""Kernels read rows of x 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Format of coded rows on the device."""

    code: Code
    group: int
    has_zeros: bool = False
    has_minima: bool = False
    fp8_inputs: bool = False
    """For fp8 with one scale for each output: inputs are rounded to fp8, one scale for each token. Not supported for
    experts."""

    def layout(self, columns: int, depth: int) -> CodedLayout:
        """Return the layout of a weight ``[columns, depth]``."""
        return CodedLayout(self.code, columns, depth, self.group, self.has_zeros, self.has_minima)


KEPT_BLOCKS = {
    "Q8_0": StoredRows(Code.INT8, 32),
    "Q4_0": StoredRows(Code.INT4, 32),
    "Q4_1": StoredRows(Code.INT4, 32, has_minima=True),
    "Q5_0": StoredRows(Code.INT8, 32),
    "Q5_1": StoredRows(Code.INT8, 32, has_minima=True),
    "Q2_K": StoredRows(Code.INT4, 16, has_minima=True),
    "Q3_K": StoredRows(Code.INT4, 16),
    "Q4_K": StoredRows(Code.INT4, 32, has_minima=True),
    "Q5_K": StoredRows(Code.INT8, 32, has_minima=True),
    "Q6_K": StoredRows(Code.INT8, 16),
    "IQ4_NL": StoredRows(Code.INT8, 32),
    "IQ4_XS": StoredRows(Code.INT8, 32),
    "MXFP4": StoredRows(Code.FP4, 32),
}
"""Keyed by the name of a GGUF type. IQ4 codes have 4 bits, but their table has values of 8 bits."""


def kept_of(scheme: Scheme | None, depth: int, dtype: torch.dtype) -> StoredRows | None:
    """Return the device format of a scheme's rows; None: they are rounded to ``dtype``. scheme: None for rows without
    codes."""
    if scheme is None or scheme.table or not multiplies(depth, dtype):
        return None
    if scheme.group % RUNS[-1] or scheme.input_factors is not None:
        return None
    if scheme.is_fp4:
        return StoredRows(Code.FP4, scheme.group)
    if scheme.bits is None:
        if scheme.weight_kind != "F8_E4M3":
            return None
        fp8_inputs = scheme.fp8_activations and not scheme.group and depth % FP8_PACK == 0
        return StoredRows(Code.FP8, scheme.group, fp8_inputs=fp8_inputs)
    has_zeros = (scheme.has_int8_zeros or scheme.zeros is not None) and scheme.all_zeros is None
    code = Code.INT4 if scheme.bits <= 4 else Code.INT8
    return StoredRows(code, scheme.group, has_zeros, has_minima=scheme.real_zeros)


def multiplies(depth: int, dtype: torch.dtype) -> bool:
    """Return True if a kernel supports this number of inputs in this format."""
    return dtype in SUFFIXES and depth % PACK_INPUTS == 0


class CodedRun:
    """Adjacent columns of a layer, in codes."""

    def __init__(
        self, shape: LinearShape, plan: WeightPlan, kept: StoredRows, sources: Sequence[RowSource]
    ) -> None:
        self.weight = CodedWeight(kept.layout(shape.columns, shape.depth), plan.device)
        plan.num_bytes += self.weight.layout.num_bytes
        declare_rows(sources, plan, plan.expect, self._fill)
        self.order = declare_order(list(sources), shape.depth, plan)
        """Permutation of the inputs for the weight, int32 ``[depth]`` on the device; None: no permutation."""
        self.bias = plan.stacked(shape.biases) if shape.biased else None
        self._result_dtype = shape.result_dtype

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` (reference)."""
        x = x if self.order is None else x.index_select(1, self.order)
        return coded_matmul_reference(x, self.weight, self.bias, self._result_dtype)

    def _fill(self, first: int, rows: Rows) -> None:
        put(self.weight, rows, first)


class Fp8Run:
    """Adjacent columns of a layer in fp8, multiplied with fp8 inputs."""

    def __init__(self, shape: LinearShape, plan: WeightPlan, sources: Sequence[RowSource]) -> None:
        self.weight = torch.empty(shape.columns, shape.depth, dtype=FP8, device=plan.device)
        self.scales = torch.empty(shape.columns, device=plan.device)
        plan.num_bytes += self.weight.nbytes + self.scales.nbytes
        declare_rows(sources, plan, plan.expect, self._fill)
        self.bias = plan.stacked(shape.biases) if shape.biased else None
        self._result_dtype = shape.result_dtype

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` (reference)."""
        return fp8_matmul_reference(x, self.weight, self.scales, self.bias, self._result_dtype)

    def _fill(self, first: int, rows: Rows) -> None:
        assert isinstance(rows, Coded), "rows in codes"
        codes = rows.codes.view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise ConfigError("an fp8 weight is NaN")
        self.weight.view(torch.uint8)[first : first + len(codes)] = codes.to(self.weight.device)
        self.scales[first : first + len(codes)] = rows.scales[:, 0].to(self.weight.device)


Part = CodedRun | Fp8Run | RowMajorLinear


class CodedLinear:
    """A layer as runs of columns of one format each; some may be rounded. A `LinearMethod`."""

    packed = None
    runs = ()
    table = None
    bias = None
    is_quantized = True
    """A tied embedding reads its own table."""

    def __init__(self, activation: GatedActivation, parts: Sequence[Part]) -> None:
        self._activation = activation
        self.parts = parts
        self.widths = [_width(part) for part in parts]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([part.apply(x) for part in self.parts], dim=1)
        if self._activation is GatedActivation.NONE:
            return y
        gate, up = y.chunk(2, dim=-1)
        return activate(gate, self._activation.kind) * up


def coded_linear(
    shape: LinearShape, plan: WeightPlan, sources: Sequence[RowSource], kept: Sequence[StoredRows | None]
) -> LinearMethod | None:
    """Return the owner of a layer on a device; ``kept`` has the format of each source.

    None if no source stays coded or the runs are misaligned.
    """
    runs = runs_of(zip(kept, map(is_ordered, sources), strict=True))
    widths = [sum(source.part.rows for source in sources[begin:end]) for begin, end in runs]
    if not any(kept) or any(width % 2 for width in widths[:-1]):  # kernels write results in pairs
        return None
    parts: list[Part] = []
    for begin, end in runs:
        its = replace(shape, parts=shape.parts[begin:end], activation=GatedActivation.NONE)
        row_format = kept[begin]
        if row_format is None:
            parts.append(RowMajorLinear(its, plan, sources[begin:end]))
        elif row_format.fp8_inputs:
            parts.append(Fp8Run(its, plan, sources[begin:end]))
        else:
            parts.append(CodedRun(its, plan, row_format, sources[begin:end]))
    return CodedLinear(shape.activation, parts)


class CodedStack:
    """Experts' matrices in codes, all of one format. A `StackMethod`."""

    packed = None
    table = None
    inputs = Inputs.SIXTEEN_BITS

    def __init__(self, shape: StackShape, plan: WeightPlan, kept: StoredRows) -> None:
        self.weight = CodedWeight(kept.layout(shape.columns, shape.depth), plan.device, shape.experts)
        plan.num_bytes += shape.experts * self.weight.layout.num_bytes
        for piece in shape.weights:
            piece.declare(plan, plan.expect, self._fill)
        self.bias = bias_of(shape, plan)

    def _fill(self, expert: int, begin: int, rows: Rows) -> None:
        put(self.weight, rows, begin, expert)


def coded_stack(shape: StackShape, plan: WeightPlan, kept: Sequence[StoredRows | None]) -> StackMethod | None:
    """Return the owner of experts' matrices with these formats of the pieces; None unless all formats are equal."""
    common_format = kept[0]
    if shape.is_exact or common_format is None or any(row_format != common_format for row_format in kept):
        return None
    return CodedStack(shape, plan, common_format)


def put(weight: CodedWeight, rows: Rows, first: int, index: int | None = None) -> None:
    """Write checkpoint rows into a weight's columns, starting at ``first``. index: expert, in a weight of several."""
    if isinstance(rows, Blocks):
        _put_blocks(weight, rows, first, index)
        return
    assert isinstance(rows, Coded), "rows in codes"
    layout, codes, zeros = weight.layout, rows.codes, rows.zeros
    minima: torch.Tensor | None = None
    if rows.order is not None:
        codes = codes[:, sorted_inputs(rows.order)]
    if zeros is not None and layout.has_minima:
        # Fractional zero points: their product with a 16-bit scale is exact.
        minima, zeros = zeros * rows.scales, None
    elif layout.code.is_integer:
        if codes.dtype == torch.int8:
            codes = codes.view(torch.uint8) ^ 128
        elif not layout.has_zeros:
            codes = codes + (layout.zero - rows.zero)  # re-centre codes of fewer bits
        elif zeros is None:
            zeros = torch.full(rows.scales.shape, rows.zero, dtype=torch.uint8)
    try:
        weight.put(first, codes.view(torch.uint8), rows.scales, zeros, minima, index=index)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _put_blocks(weight: CodedWeight, rows: Blocks, first: int, index: int | None) -> None:
    """Write blocks, a few million values at a time."""
    step = max(1, MOST_CODES // (weight.layout.depth * BRICK_COLUMNS)) * BRICK_COLUMNS
    for begin in range(0, len(rows.raw), step):
        its = Blocks(rows.raw[begin : begin + step], rows.kind).integers()
        codes = its.codes + (weight.layout.zero - its.zero)
        weight.put(first + begin, codes, its.scales, None, its.minima, index=index)


def _width(part: Part) -> int:
    if isinstance(part, CodedRun):
        return part.weight.layout.columns
    return len(part.weight if isinstance(part, Fp8Run) else part.table)
