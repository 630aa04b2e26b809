"""States of a step's rows on a device: where a layer's are, and whose tables name them."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.kv_memory import DeviceKv
from quintet.executor.backends.cuda.rows import StepRows
from quintet.executor.models.layers.states import StatePart


class DeviceStates:
    """The states of one step."""

    def __init__(self, rows_of: list[StepRows], kv: DeviceKv) -> None:
        """rows_of: the step's rows as each group sees them."""
        self._rows_of = rows_of
        self._kv = kv

    def of(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StepRows, torch.Tensor]:
        """Return the step's rows in the group of a layer's states, and the part in every block."""
        group, place = self._kv.spec.place(part.index, state=True)
        return self._rows_of[group], part.of(self._kv.places[place], dtype)
