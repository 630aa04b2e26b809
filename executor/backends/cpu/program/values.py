"""Nodes of a recorded pass: values, and operations that read values and write one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch


class Extent(IntEnum):
    """Row dimension of a value; ``qt::Extent``."""

    TOKENS = 0
    """All tokens of the step."""
    OUTPUTS = 1
    """Tokens that need logits."""


@dataclass(eq=False, slots=True)
class Value:
    """A value of the recorded pass, or a view of some of its columns."""

    width: int
    extent: Extent
    place: torch.Tensor | None = None
    """Memory ``[max_rows, width]``; None until planned, except for memory shared with other ranks. None in a view."""
    viewed: Value | None = None
    """Value that this is a view of."""
    begin: int = 0
    """First column of the view."""
    dtype: torch.dtype | None = None
    """None: the dtype of the pass."""

    @property
    def owner(self) -> Value:
        """The viewed value, or this one if it is no view."""
        return self if self.viewed is None else self.viewed

    @property
    def tensor(self) -> torch.Tensor:
        """Memory ``[max_rows, width]``."""
        place = self.owner.place
        assert place is not None, "no memory yet"
        return place.narrow(1, self.begin, self.width)

    @property
    def address(self) -> int:
        """Address of the first element."""
        return self.tensor.data_ptr()

    @property
    def stride(self) -> int:
        """Elements from one row to the next."""
        return self.tensor.stride(0)


class CColumns(ctypes.Structure):
    """``qt::Columns``: address of a value and its row stride in elements."""

    _fields_ = (("numbers", ctypes.c_void_p), ("stride", ctypes.c_int64))


def columns_of(*values: tuple[int | None, int]) -> ctypes.Array[CColumns]:
    """Pack addresses and strides for the C functions."""
    return (CColumns * len(values))(*(CColumns(*value) for value in values))


EmitWith = Callable[[Value, Value | None, int], None]
"""Appends an operation with a fused addition or activation.

Arguments: the value written, the value added (same layout) or None, and the activation code or 0.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A recorded operation; appends itself to the program once all its values have memory."""

    name: str
    emit: Callable[[], None]
    reads: tuple[Value, ...]
    writes: Value
    over: tuple[Value, ...] = ()
    """Values that the result may overwrite, if this is their last read."""
    emit_with: EmitWith | None = None
    """Used instead of ``emit`` when a reader is fused into this operation."""
    sums: tuple[Value, Value] | None = None
    """Summands of a plain addition, which may be fused into the producer of either."""
    activates: tuple[Value, int] | None = None
    """Input and code of a plain activation, which may be fused into the producer of the input."""
