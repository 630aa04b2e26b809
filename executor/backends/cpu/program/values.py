"""What a recorded pass is made of: values, and operations that read some and write one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch


class Extent(IntEnum):
    """What the rows of a value are; ``qt::Extent``."""

    TOKENS = 0
    """Every token of the step."""
    OUTPUTS = 1
    """Those whose logits are wanted."""


@dataclass(eq=False, slots=True)
class Value:
    """A value of the pass being recorded, or a view of some columns of one."""

    width: int
    extent: Extent
    place: torch.Tensor | None = None
    """Its memory, ``[max_rows, width]``, once places are given out, or from the beginning where others see it too. A view has
    none of its own."""
    viewed: Value | None = None
    """Of whose columns it is a view."""
    begin: int = 0
    """Which is the view's first column."""
    dtype: torch.dtype | None = None
    """Its number format; None: the pass's."""

    @property
    def owner(self) -> Value:
        """Whose memory it lies in: its own, unless it is a view."""
        return self if self.viewed is None else self.viewed

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory, ``[max_rows, width]``."""
        place = self.owner.place
        assert place is not None, "no memory yet"
        return place.narrow(1, self.begin, self.width)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.tensor.data_ptr()

    @property
    def stride(self) -> int:
        """Numbers from a row to the next."""
        return self.tensor.stride(0)


EmitWith = Callable[[Value, Value | None, int], None]
"""Appends an operation whose result is added to another value, which lies alike, or activated, as it is made. Takes the value
that this makes, the other one or None, and the activation's code or 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Appends itself to the program, once all its values have memory."""

    name: str
    emit: Callable[[], None]
    reads: tuple[Value, ...]
    writes: Value
    over: tuple[Value, ...] = ()
    """Values over which the result may be written, where they are read for the last time."""
    emit_with: EmitWith | None = None
    """Instead of ``emit``, where a reader's operation becomes a part of this one."""
    sums: tuple[Value, Value] | None = None
    """What an operation adds that does nothing else, and so may be a part of the one that makes a summand."""
    activates: tuple[Value, int] | None = None
    """What an operation activates that does nothing else, and the code of the activation; likewise."""
