"""Bindings of the linear kernels of ``csrc/cpu``: packed weights and their multiplication.

`quintet.executor.backends.cpu.ops.packed_weight` checks shapes. `quintet.executor.backends.cpu.program.library` has the same
kernels as operations of a program.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag
from functools import cache, partial

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import declare, open_library

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Inputs(IntEnum):
    """Activation quantization for integer weights; codes of csrc/cpu/linear/linear.hpp."""

    SIXTEEN_BITS = 0
    """One scale per group of the weight, or per 256 inputs for a weight without groups."""
    EIGHT_BITS = 1
    """One scale per token."""
    EIGHT_BITS_IN_GROUPS = 2
    """One scale per group of the weight (at least 32 inputs), or per token for a weight without groups."""


class WeightFormat(IntEnum):
    """Storage format of a packed weight; codes of csrc/cpu/linear/weight_formats.hpp."""

    BF16 = 0
    FP16 = 1
    FP32 = 2
    INT8 = 3
    INT4 = 4
    INT4_ZEROS = 5
    """4 bits with one zero point per group."""
    INT8_ZEROS = 6
    """8 bits with one zero point per group."""
    Q4_1 = 7
    """The formats from this one to MXFP4 are GGUF types."""
    Q5_0 = 8
    Q5_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 15
    IQ4_XS = 16
    MXFP4 = 17
    """A GGUF type; also filled from codes of safetensors."""
    NVFP4 = 18
    """Filled from codes only."""
    FP8 = 19
    """fp8 e4m3 bytes with one fp32 scale per group; multiplied in floating point, like the formats up to FP4."""
    NF4 = 20
    """bitsandbytes' table of 16 values; so is FP4."""
    FP4 = 21
    INT4_SINGLE = 22
    """Integers with fp32 scales per group, as are the formats up to INT8_SINGLE_ZEROS. ``_ZEROS``: zero points in fp32 that need
    not be integers."""
    INT8_SINGLE = 23
    INT4_SINGLE_ZEROS = 24
    INT8_SINGLE_ZEROS = 25
    TABLES = 26
    """4-bit codes into a table of 16 fp32 values per output, plus outliers that are added to some elements."""

    @property
    def is_float(self) -> bool:
        """True if the weight is stored in a dtype of activations."""
        return self <= WeightFormat.FP32

    @property
    def has_zeros(self) -> bool:
        """True if groups have zero points."""
        return self in (WeightFormat.INT4_ZEROS, WeightFormat.INT8_ZEROS) or self.has_real_zeros

    @property
    def has_real_zeros(self) -> bool:
        """True if zero points are fp32; otherwise they are bytes."""
        return self in (WeightFormat.INT4_SINGLE_ZEROS, WeightFormat.INT8_SINGLE_ZEROS)

    @property
    def has_singles(self) -> bool:
        """True if integer groups have fp32 scales; such a format is only filled from codes."""
        return WeightFormat.INT4_SINGLE <= self <= WeightFormat.INT8_SINGLE_ZEROS

    @property
    def has_tables(self) -> bool:
        """True if each column has its own table; such a format is only filled from codes."""
        return self is WeightFormat.TABLES

    @property
    def has_own_group(self) -> bool:
        """True if the format defines its group size, so ``group`` is 0; such a format is only filled from codes or blocks."""
        return WeightFormat.Q4_1 <= self <= WeightFormat.NVFP4

    @property
    def is_coded_float(self) -> bool:
        """True if codes decode to floating-point values; activations are then not quantized."""
        return WeightFormat.FP8 <= self <= WeightFormat.FP4 or self.has_tables

    @property
    def is_integer(self) -> bool:
        """True if the multiplication is in integers; activations are then quantized."""
        return not self.is_float and not self.is_coded_float

    @property
    def code_levels(self) -> int:
        """Number of codes that `PackedWeight.fill_codes` accepts; 0: the format is not filled from codes."""
        if self in _OF_BYTES:
            return 256
        has_no_codes = self.is_float or self.has_tables or (self.has_own_group and not self.bytes_group)
        return 0 if has_no_codes else 16

    @property
    def bytes_group(self) -> int:
        """For fp4: number of inputs that share a one-byte scale; 0 for other formats."""
        return {WeightFormat.MXFP4: 32, WeightFormat.NVFP4: 16}.get(self, 0)

    def block(self, group: int) -> tuple[int, int] | None:
        """Return the inputs and the bytes of a GGUF block; None if GGUF has no such format."""
        return _BLOCKS.get(self) if group == (0 if self.has_own_group else 32) else None


_OF_BYTES = {
    WeightFormat.INT8,
    WeightFormat.INT8_ZEROS,
    WeightFormat.INT8_SINGLE,
    WeightFormat.INT8_SINGLE_ZEROS,
    WeightFormat.FP8,
}
_BLOCKS = {
    WeightFormat.INT8: (32, 34),
    WeightFormat.INT4: (32, 18),
    WeightFormat.Q4_1: (32, 20),
    WeightFormat.Q5_0: (32, 22),
    WeightFormat.Q5_1: (32, 24),
    WeightFormat.Q2_K: (256, 84),
    WeightFormat.Q3_K: (256, 110),
    WeightFormat.Q4_K: (256, 144),
    WeightFormat.Q5_K: (256, 176),
    WeightFormat.Q6_K: (256, 210),
    WeightFormat.IQ4_NL: (32, 18),
    WeightFormat.IQ4_XS: (256, 136),
    WeightFormat.MXFP4: (32, 17),
}
"""Inputs and bytes per GGUF block. Q8_0 is INT8 and Q4_0 is INT4, both in groups of 32."""


class CodesProblem(IntFlag):
    """Problems that `LinearLibrary.weight_fill_codes` reports; ``qt::Problem``."""

    CODE = 1
    """A code is outside the format's range."""
    SCALE = 2
    """A scale or zero point is not representable in the packed format."""


class LinearLibrary:
    """C functions; csrc/cpu/linear/weight.cpp and linear_calls.cpp document the arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        function, a, n, i = partial(declare, library), _ADDRESS, _SIZE, _INT
        self.weight_bytes = function("qt_weight_bytes", i, n, n, n, i, result=n)
        self.weight_new = function("qt_weight_new", i, n, n, n, i, n, n, a, result=a)
        self.weight_delete = function("qt_weight_delete", a)
        self.weight_fill = function("qt_weight_fill", a, a, i, n, n, n)
        self.weight_fill_codes = function(
            "qt_weight_fill_codes", a, a, i, n, a, i, n, n, a, a, n, n, n, result=i
        )
        self.weight_fill_tables = function("qt_weight_fill_tables", a, a, n, a, n, n, result=i)
        self.weight_outlier_bytes = function("qt_weight_outlier_bytes", n, n, i, n, result=n)
        self.weight_set_outliers = function("qt_weight_set_outliers", a, a, n)
        self.weight_fill_outliers = function("qt_weight_fill_outliers", a, n, n, a, a, a, result=i)
        self.weight_fill_blocks = function("qt_weight_fill_blocks", a, a, n, n, n)
        self.weight_read = function("qt_weight_read", a, n, n, a)
        self.linear = function("qt_weight_linear", a, a, n, n, i, a, a, a, n, i, i, i)


def head_linear(handles: ctypes.Array[ctypes.c_void_p], x: torch.Tensor, width: int) -> torch.Tensor:
    """Multiply each head's columns of ``x [tokens, heads * depth]`` by its weight; return ``[tokens, width]``.

    handles: one weight per head, of equal shapes and of the dtype of x. The reference is `torch.bmm`.
    """
    library = open_library()
    assert library is not None and x.stride(1) == 1, "packed weights exist, so the library is loaded"
    multiply = declare(
        library, "qt_op_head_linear", _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS, _SIZE
    )
    y = torch.empty((len(x), width), dtype=x.dtype)
    multiply(
        *(ctypes.addressof(handles), len(handles), x.data_ptr(), x.stride(0), len(x), FLOAT_CODES[x.dtype]),
        *(y.data_ptr(), y.stride(0)),
    )
    return y


@cache
def linear_library() -> LinearLibrary | None:
    """Return the functions, or None if the library is not built."""
    library = open_library()
    return None if library is None else LinearLibrary(library)
