"""Packed formats on the host: selection of an exact format, and writing of checkpoint rows into packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat
from quintet.executor.backends.cpu.ops.packed_tables import fill_tables
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError
from quintet.executor.checkpoints.quant.blocks import Blocks
from quintet.executor.checkpoints.quant.decode import Coded
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS, PackedFormat
from quintet.executor.checkpoints.quant.source import Rows, floats_of, sorted_inputs
from quintet.wire.errors import ConfigError

GROUPS = (128, 64, 32, 16)
"""Supported group sizes of a packed weight; 0 (one group) is supported too."""

FP4 = {32: WeightFormat.MXFP4, 16: WeightFormat.NVFP4}
"""Keyed by group size."""
TABLES = {"nf4": WeightFormat.NF4, "fp4": WeightFormat.FP4}
_HALVES = (
    (WeightFormat.INT4, WeightFormat.INT4_ZEROS),
    (WeightFormat.INT8, WeightFormat.INT8_ZEROS),
)
"""Integers of 4 and 8 bits, without and with zero points. Scales of groups are fp16 times a power of two, zero points
are integers."""
_SINGLES = (
    (WeightFormat.INT4_SINGLE, WeightFormat.INT4_SINGLE_ZEROS),
    (WeightFormat.INT8_SINGLE, WeightFormat.INT8_SINGLE_ZEROS),
)
"""Integers of 4 and 8 bits, without and with zero points; scales and zero points are fp32."""
ALONE = {WeightFormat.FP8, *FP4.values(), *TABLES.values(), WeightFormat.TABLES}
"""Formats that hold only their own rows."""


def packed_format_of(schemes: Sequence[Scheme | None], dtype: torch.dtype) -> PackedFormat:
    """Return a format that holds the rows of all schemes exactly; the float format of ``dtype`` if none does (rows are
    rounded).

    None among the schemes: rows in floating point.
    """
    each = {None if scheme is None else _exact(scheme) for scheme in schemes}
    known = [packed_format for packed_format in each if packed_format is not None]
    formats = {packed_format.weight_format for packed_format in known}
    if len(each) == 1 and formats <= ALONE:
        return known[0] if known else PackedFormat(FLOAT_FORMATS[dtype])
    orders = {scheme is not None and scheme.order is not None for scheme in schemes}
    inputs = {packed_format.inputs for packed_format in known}
    if len(known) < len(each) or formats & ALONE or len(orders) > 1 or len(inputs) > 1:
        return PackedFormat(FLOAT_FORMATS[dtype])
    eight = any(each.code_levels == 256 for each in formats)
    zeros = any(each.has_zeros for each in formats)
    integers = _SINGLES if any(each.has_singles for each in formats) else _HALVES
    group = min((packed_format.group for packed_format in known if packed_format.group), default=0)
    if not group and (zeros or not eight):
        group = GROUPS[0]
    return PackedFormat(integers[eight][zeros], group, known[0].inputs)


def _exact(scheme: Scheme) -> PackedFormat | None:
    """Return a format that holds the rows of one scheme exactly, or None. A group of 0 may become any."""
    if scheme.input_factors is not None:
        return None
    if scheme.is_fp4:
        has_factor = scheme.global_scale is not None
        return PackedFormat(FP4[scheme.group]) if scheme.group == (16 if has_factor else 32) else None
    if scheme.row_tables:
        return PackedFormat(WeightFormat.TABLES)
    if scheme.table or scheme.weight_kind == "F8_E4M3":
        group = next((each for each in GROUPS if scheme.group % each == 0), 0)
        return PackedFormat(TABLES.get(scheme.table, WeightFormat.FP8), group) if group else None
    if scheme.bits is None:
        return None
    zeros = (scheme.has_int8_zeros or scheme.zeros is not None) and scheme.all_zeros is None
    integers = _SINGLES if scheme.real_zeros or (scheme.group and scheme.scale_kind == "F32") else _HALVES
    group = 0
    if scheme.group:
        group = next((each for each in GROUPS if scheme.group % each == 0), 0)
        if not group:
            return None
    return PackedFormat(
        integers[scheme.bits > 4][zeros or scheme.real_zeros],
        group,
        Inputs.EIGHT_BITS if scheme.bits > 4 and scheme.int8_activations else Inputs.SIXTEEN_BITS,
    )


def fill(packed: PackedWeight, rows: Rows, first_column: int) -> None:
    """Write rows into columns from ``first_column`` on, converted to the packed weight's format."""
    if isinstance(rows, Blocks) and not packed.format.is_float:
        packed.fill_blocks(rows.raw, first_column)
        return
    is_rounded = (
        isinstance(rows, Coded) and rows.scale_bytes is not None and packed.format not in FP4.values()
    )
    if packed.format.is_float or not isinstance(rows, Coded) or is_rounded:
        floats = floats_of(rows)
        packed.fill(floats if floats.dtype in FLOAT_CODES else floats.float(), first_column)
        return
    try:
        if packed.format.has_tables:
            assert rows.row_tables is not None, "these numbers have tables"
            fill_tables(packed, rows.codes, rows.row_tables, rows.outliers, first_column)
        elif packed.format.is_coded_float:
            packed.fill_codes(rows.codes.view(torch.uint8), rows.scales, None, first_column, rows.group)
        elif rows.scale_bytes is not None:
            factors = None if rows.factor is None else rows.factor.expand(len(rows.codes))
            packed.fill_fp4(rows.codes, rows.scale_bytes, factors, first_column)
        else:
            _fill_integers(packed, rows, first_column)
    except PackedWeightError as error:  # invalid scales in the checkpoint
        raise ConfigError(str(error)) from error


def _fill_integers(packed: PackedWeight, rows: Coded, first_column: int) -> None:
    codes, zeros, zero = rows.codes, rows.zeros, rows.zero
    if rows.order is not None:
        codes = codes[:, sorted_inputs(rows.order)]
    if not packed.format.has_zeros:
        assert zeros is None, "these numbers have zero points"
        if codes.dtype is torch.uint8:
            codes = (codes - zero).view(torch.int8)
    elif zeros is None:
        if codes.dtype is torch.int8:
            codes, zero = codes.view(torch.uint8) + 128, 128
        zeros = torch.full(rows.scales.shape, zero, dtype=torch.uint8)
    if zeros is not None and packed.format.has_real_zeros:
        zeros = zeros.float()
    packed.fill_codes(codes, rows.scales, zeros, first_column, rows.group)
