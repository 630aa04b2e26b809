"""Arguments of the CPU's state operations, ``csrc/cpu/ops/states.cpp``, for bf16, fp16 and fp32 rows.

`quintet.executor.backends.cpu.ops.states` has the references. Rows and blocks may be strided; their elements are contiguous.
"""

from __future__ import annotations

import ctypes
from typing import Any

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_Y = (_ADDRESS, _SIZE, _INT)  # address, stride and format

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "causal_conv": (_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT, *_Y),
    "selective_scan": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, *_Y),
    "head_scan": (
        *(_ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _FLOAT),
        *_Y,
    ),
    "delta_rule": (_ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, *_Y),
}
"""Arguments of each operation after the rows (or a layer's memory) and the offset of its states."""


class CColumns(ctypes.Structure):
    """``qt::Columns``: address of a value and its row stride in elements."""

    _fields_ = (("numbers", _ADDRESS), ("stride", _SIZE))


def columns_of(*values: tuple[int | None, int]) -> ctypes.Array[CColumns]:
    """Pack addresses and strides for the C functions."""
    return (CColumns * len(values))(*(CColumns(*value) for value in values))
