"""States of a step's rows on a device: which blocks they read and write, without the host looking.

Padding rows have no block. They write once more what the step's first row writes, into the same block, so that a captured
step needs no branch. A step of padding alone writes block 0: at boot, when nobody holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from quintet.executor.cuda.rows import StepRows
from quintet.executor.layers.states import StatePart
from quintet.executor.ops.state_rows import StateRows
from quintet.wire.kv_spec import KvSpec


class DeviceStates:
    """The states of one step."""

    def __init__(
        self, rows: StepRows, spec: KvSpec, block_table: torch.Tensor, places: Sequence[torch.Tensor]
    ) -> None:
        """block_table: int32 ``[groups, slots, positions]``; places: uint8 ``[num_blocks, layer_bytes]`` each."""
        self._spec = spec
        self._places = places
        self._rows = cache(lambda group: state_rows(rows, block_table[group]))

    def of(self, part: StatePart, dtype: torch.dtype = torch.float32) -> tuple[StateRows, torch.Tensor]:
        """Return the step's rows in the group of a layer's states, and the part in every block."""
        group, place = self._spec.place(part.index, state=True)
        return self._rows(group), part.of(self._places[place], dtype)


def state_rows(rows: StepRows, table: torch.Tensor) -> StateRows:
    """Return which blocks the rows read and write; table: int32 ``[slots, positions]``, of a group of states."""
    twins = torch.where(rows.counts > 0, torch.arange(rows.num_rows, device=rows.counts.device), 0)
    named = table[rows.slots[twins].clamp(min=0).long(), :2].long()
    return StateRows(
        sources=named[:, 0],
        targets=named[:, 1],
        fresh=rows.starts[twins] == 0,
        offsets=rows.offsets[:-1].long(),
        counts=rows.counts.long(),
        max_count=rows.max_count,
        twins=twins,
    )
