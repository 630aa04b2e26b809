"""States of a step's rows on a device: which blocks they read and write, without the host looking.

Padding rows have no block. They write once more what the step's first row writes, into the same block, so that a captured
step needs no branch. A step of padding alone, such as a graph's before it is captured, writes a block that nobody gets.
"""

from __future__ import annotations

from functools import cache

import torch

from quintet.executor.cuda.kv_memory import DeviceKv
from quintet.executor.cuda.rows import StepRows
from quintet.executor.layers.states import StatePart
from quintet.executor.ops.state_rows import StateRows


class DeviceStates:
    """The states of one step."""

    def __init__(self, rows: StepRows, kv: DeviceKv) -> None:
        """rows: of all groups."""
        self._kv = kv
        self._rows = cache(lambda group: state_rows(rows.of_group(group), kv.num_blocks))

    def of(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StateRows, torch.Tensor]:
        """Return the step's rows in the group of a layer's states, and the part in every block."""
        group, place = self._kv.spec.place(part.index, state=True)
        return self._rows(group), part.of(self._kv.places[place], dtype)


def state_rows(rows: StepRows, spare: int) -> StateRows:
    """Return which blocks the rows, of a group of states, read and write; ``spare``: a block that nobody gets."""
    twins = torch.where(rows.counts > 0, torch.arange(rows.num_rows, device=rows.counts.device), 0)
    named = rows.block_table[rows.slots[twins].clamp(min=0).long(), :2].long()
    named = torch.where(rows.counts[twins, None] > 0, named, spare)
    return StateRows(
        sources=named[:, 0],
        targets=named[:, 1],
        fresh=rows.starts[twins] == 0,
        offsets=rows.offsets[:-1].long(),
        counts=rows.counts.long(),
        max_count=rows.max_count,
        twins=twins,
    )
