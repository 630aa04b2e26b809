"""Recurrent states of a step's rows on a device."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.kv_memory import DeviceKv
from quintet.executor.backends.cuda.rows import StepRows
from quintet.executor.models.layers.states import StatePart


class DeviceStates:
    """States of one step."""

    def __init__(self, rows_of: list[StepRows], kv: DeviceKv) -> None:
        """rows_of: the step's rows, per KV group."""
        self._rows_of = rows_of
        self._kv = kv

    def of(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StepRows, torch.Tensor]:
        """Return the step's rows in the layer's state group, and the state tensor ``[num_blocks, ...]``."""
        group, place = self._kv.spec.place(part.index, state=True)
        return self._rows_of[group], part.of(self._kv.places[place], dtype)
