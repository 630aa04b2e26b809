"""The linear kernels of ``csrc/cpu`` as functions of addresses: packed weights, multiplication.

Knows no shapes: `quintet.executor.backends.cpu.ops.packed_weight` checks them before it hands over addresses. The
same as operations of a program: `quintet.executor.backends.cpu.program.library`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum, IntFlag
from functools import cache
from typing import Any

import torch

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import declare, open_library

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Inputs(IntEnum):
    """What inputs are rounded to where weights are integers; the codes of csrc/cpu/linear.hpp."""

    SIXTEEN_BITS = 0
    """A scale for each group of the weight, or for 256 inputs where it has none."""
    EIGHT_BITS = 1
    """A scale for each token."""
    EIGHT_BITS_IN_GROUPS = 2
    """A scale for each group of the weight, of 32 inputs at least; for each token where it has none."""


class WeightFormat(IntEnum):
    """How a packed weight stores its numbers; the codes of csrc/cpu/weight_formats.hpp."""

    BF16 = 0
    FP16 = 1
    FP32 = 2
    INT8 = 3
    INT4 = 4
    INT4_ZEROS = 5
    """4 bits with a zero point per group."""
    INT8_ZEROS = 6
    """8 bits, likewise."""
    Q4_1 = 7
    """From here on GGUF's, by the names of their types there."""
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
    """Also of safetensors, from codes."""
    NVFP4 = 18
    """From codes alone."""
    FP8 = 19
    """From here on numbers that are multiplied in floating point: bytes of fp8, e4m3, with a scale for each group, in fp32."""
    NF4 = 20
    """bitsandbytes' tables of 16, likewise."""
    FP4 = 21
    INT4_SINGLE = 22
    """From here on integers again, whose groups have scales in fp32, and zeros in fp32, which need not be integers."""
    INT8_SINGLE = 23
    INT4_SINGLE_ZEROS = 24
    INT8_SINGLE_ZEROS = 25
    TABLES = 26
    """4 bits that choose from 16 numbers in fp32, which each output has for itself, and outliers that are added to some."""

    @property
    def is_float(self) -> bool:
        """Whether the numbers are stored as the activations are."""
        return self <= WeightFormat.FP32

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zero points."""
        return self in (WeightFormat.INT4_ZEROS, WeightFormat.INT8_ZEROS) or self.has_real_zeros

    @property
    def has_real_zeros(self) -> bool:
        """Whether they are numbers in fp32; otherwise they are bytes."""
        return self in (WeightFormat.INT4_SINGLE_ZEROS, WeightFormat.INT8_SINGLE_ZEROS)

    @property
    def has_singles(self) -> bool:
        """Whether scales of groups of integers are in fp32; nothing is rounded into such a format."""
        return WeightFormat.INT4_SINGLE <= self <= WeightFormat.INT8_SINGLE_ZEROS

    @property
    def has_tables(self) -> bool:
        """Whether each column has its own; nothing is rounded into such a format."""
        return self is WeightFormat.TABLES

    @property
    def has_own_group(self) -> bool:
        """Whether its group is given as 0, for it has its own; nothing is rounded into such a format."""
        return WeightFormat.Q4_1 <= self <= WeightFormat.NVFP4

    @property
    def is_coded_float(self) -> bool:
        """Whether codes stand for floating-point numbers, which are scaled and multiplied as such; x is what it is."""
        return WeightFormat.FP8 <= self <= WeightFormat.FP4 or self.has_tables

    @property
    def is_integer(self) -> bool:
        """Whether integers are multiplied, and x becomes some."""
        return not self.is_float and not self.is_coded_float

    @property
    def code_levels(self) -> int:
        """How many codes there are that `PackedWeight.fill_codes` takes; 0: it takes none."""
        if self in _OF_BYTES:
            return 256
        takes_none = self.is_float or self.has_tables or (self.has_own_group and not self.bytes_group)
        return 0 if takes_none else 16

    @property
    def bytes_group(self) -> int:
        """Of fp4: how many k share a scale that is a byte; 0 of others."""
        return {WeightFormat.MXFP4: 32, WeightFormat.NVFP4: 16}.get(self, 0)

    def block(self, group: int) -> tuple[int, int] | None:
        """Return how many k a block of a GGUF file holds, and its bytes there; None where such files have no such format."""
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
"""Q8_0 is int8 and Q4_0 int4, in groups of 32."""


class CodesProblem(IntFlag):
    """What `LinearLibrary.weight_fill_codes` found; ``qt::Problem``."""

    CODE = 1
    """A code that the format does not have."""
    SCALE = 2
    """A scale or a zero point that the packed form does not hold."""


class LinearLibrary:
    """The functions; csrc/cpu/weight.cpp and linear_calls.cpp say what each argument is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *arguments: type, result: type | None = None) -> Callable[..., Any]:
            return declare(library, name, *arguments, result=result)

        self.weight_bytes = function("qt_weight_bytes", _INT, _SIZE, _SIZE, _SIZE, _INT, result=_SIZE)
        self.weight_new = function(
            "qt_weight_new",
            *(_INT, _SIZE, _SIZE, _SIZE, _INT, _SIZE, _SIZE, _ADDRESS),
            result=_ADDRESS,
        )
        self.weight_delete = function("qt_weight_delete", _ADDRESS)
        self.weight_fill = function("qt_weight_fill", _ADDRESS, _ADDRESS, _INT, _SIZE, _SIZE, _SIZE)
        self.weight_fill_codes = function(
            "qt_weight_fill_codes",
            *(
                _ADDRESS,
                _ADDRESS,
                _INT,
                _SIZE,
                _ADDRESS,
                _INT,
                _SIZE,
                _SIZE,
                _ADDRESS,
                _ADDRESS,
                _SIZE,
                _SIZE,
                _SIZE,
            ),
            result=_INT,
        )
        self.weight_fill_tables = function(
            "qt_weight_fill_tables", _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, result=_INT
        )
        self.weight_outlier_bytes = function(
            "qt_weight_outlier_bytes", _SIZE, _SIZE, _INT, _SIZE, result=_SIZE
        )
        self.weight_set_outliers = function("qt_weight_set_outliers", _ADDRESS, _ADDRESS, _SIZE)
        self.weight_fill_outliers = function(
            "qt_weight_fill_outliers", _ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, result=_INT
        )
        self.weight_fill_blocks = function("qt_weight_fill_blocks", _ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE)
        self.weight_read = function("qt_weight_read", _ADDRESS, _SIZE, _SIZE, _ADDRESS)
        self.linear = function(
            "qt_weight_linear",
            *(_ADDRESS, _ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _INT),
        )


def head_linear(handles: ctypes.Array[ctypes.c_void_p], x: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[tokens, width]``: each head's columns of ``x [tokens, heads * depth]`` times the weight of its handle.

    Weights are of one shape and format, that of x. The reference is `torch.bmm`.
    """
    library = open_library()
    assert library is not None and x.stride(1) == 1, "there are packed weights, and so a library"
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
    """Return the functions, or None where the library was not built."""
    library = open_library()
    return None if library is None else LinearLibrary(library)
