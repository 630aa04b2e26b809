"""What changes from step to step, as the C++ side reads it: ``qt::Step`` of ``csrc/cpu/program.hpp``."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from quintet.executor.batch import Rows
from quintet.executor.ragged import ranges
from quintet.executor.slots import SlotTables

_SIZE, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class CStep(ctypes.Structure):
    """Field by field ``qt::Step``; its comments say what each is."""

    _fields_ = (
        ("num_tokens", _SIZE),
        ("num_rows", _SIZE),
        ("num_outputs", _SIZE),
        ("token_ids", _ADDRESS),
        ("positions", _ADDRESS),
        ("row_slots", _ADDRESS),
        ("row_starts", _ADDRESS),
        ("row_counts", _ADDRESS),
        ("row_offsets", _ADDRESS),
        ("block_table", _ADDRESS),
        ("block_table_stride", _SIZE),
        ("output_tokens", _ADDRESS),
        ("cosines", _ADDRESS),
        ("sines", _ADDRESS),
        ("rope_by_token", _SIZE),
    )


class Step:
    """A `CStep` and the arrays it points into."""

    __slots__ = ("_arrays", "c", "positions", "slots")

    def __init__(self, rows: Rows, tables: SlotTables) -> None:
        """Describe the rows of a plan whose deltas ``tables`` already hold; without outputs and rotation."""
        if len(rows.counts) == int(rows.counts.sum()):
            slots, positions = rows.slots, rows.starts
        else:
            owners, positions = ranges(rows.starts, rows.counts)
            slots = rows.slots[owners]
        token_ids = tables.token_ids.numpy()[slots, positions]
        self.slots, self.positions = slots, positions
        """int64[num_tokens]: each token's slot and position."""
        block_table = tables.block_table
        columns = (token_ids, positions, rows.slots, rows.starts, rows.counts, rows.offsets)
        self._arrays: tuple[NDArray[np.generic], ...] = columns
        assert all(array.flags.c_contiguous for array in (*columns, block_table)), "a column has gaps"
        self.c = CStep(
            len(positions),
            len(rows.slots),
            0,
            *(array.ctypes.data for array in columns),
            block_table.ctypes.data,
            block_table.shape[1],
        )
