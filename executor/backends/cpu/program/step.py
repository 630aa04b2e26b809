"""Per-step arguments of a program: ``qt::Step`` of ``csrc/cpu/runtime/program.hpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.kv_memory import KvMemory
from quintet.executor.ragged import Int
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables

_SIZE, _ADDRESS = ctypes.c_int64, ctypes.c_void_p

NUM_MARKS = 2
COLUMNS_OF_ROWS = (
    *("row_slots", "row_starts", "row_counts", "row_offsets", "row_adapters"),
    *("output_tokens", "output_slots", "output_positions"),
)


class CRotation(ctypes.Structure):
    """Mirror of ``qt::Rotation``, which documents the fields."""

    _fields_ = (("cosines", _ADDRESS), ("sines", _ADDRESS), ("by_token", _SIZE))


class CStep(ctypes.Structure):
    """Mirror of ``qt::Step``, which documents the fields."""

    _fields_ = (
        *((name, _SIZE) for name in ("num_tokens", "num_rows", "num_outputs")),
        *((name, _ADDRESS) for name in ("token_ids", "positions")),
        *((name, _ADDRESS) for name in ("row_slots", "row_starts", "row_counts", "row_offsets")),
        ("block_table", _ADDRESS),
        *((name, _SIZE) for name in ("block_table_stride", "block_table_group_stride")),
        *((name, _ADDRESS) for name in ("output_tokens", "rotations")),
        *((name, _SIZE) for name in ("max_tokens", "max_rows", "num_slots")),
        ("slot_tokens", _ADDRESS),
        ("slot_tokens_stride", _SIZE),
        *((name, _ADDRESS) for name in ("settings", "output_slots", "output_positions")),
        *((name, _ADDRESS) for name in ("drawn", "masks", "marks", "slot_adapters", "row_adapters")),
    )


class KvPlace(ctypes.Structure):
    """Location of a layer's KV or state; mirror of ``qt::KvPlace`` of ``csrc/cpu/attention/blocks.hpp``."""

    _fields_ = (
        ("memory", _ADDRESS),
        ("block_bytes", _SIZE),
        ("group", _SIZE),
        ("sharers", _SIZE),
        ("sharer", _SIZE),
        ("drafts", _SIZE),
    )


def kv_place(kv: KvMemory, layer: int, *, state: bool = False) -> KvPlace:
    """Return the location of a layer's keys and values, or of its recurrent state."""
    if state and kv.states is not None:
        kv = kv.states
    group, place = kv.spec.place(layer, state=state)
    drafts = kv.draft_block(group) if state else 0
    address, stripe = kv.places[place].data_ptr(), kv.stripe
    return KvPlace(address, kv.spec.layer_bytes, group, stripe.size, stripe.index, drafts)


class Step:
    """A `CStep` that is refilled for each plan, and the arrays that it points into."""

    def __init__(self, library: ProgramLibrary, max_tokens: int, max_rows: int) -> None:
        library.check_layout("qt_step_bytes", ctypes.sizeof(CStep))
        self._fill = library.fill_step
        self._tables: SlotTables | None = None
        self._settings: Settings | None = None
        self.columns: dict[str, NDArray[np.generic]] = {
            name: np.zeros(max_rows, np.int64) for name in COLUMNS_OF_ROWS
        }
        """Arrays by name; a smaller step uses their first entries."""
        self.columns |= {
            "token_ids": np.zeros(max_tokens, np.int32),
            "positions": np.zeros(max_tokens, np.int64),
        }
        self.columns |= {"drawn": np.zeros(max_rows, np.int32), "marks": np.zeros(NUM_MARKS, np.int64)}
        self.c = CStep(max_tokens=max_tokens, max_rows=max_rows)
        for name, column in self.columns.items():
            setattr(self.c, name, column.ctypes.data)
        self.address = ctypes.byref(self.c)

    def fill(self, rows: Rows, tables: SlotTables, settings: Settings | None = None) -> int:
        """Fill in the rows of a plan, without rotations. ``tables`` already include the plan's deltas.

        Returns the largest position plus 1. Raises ValueError if the plan exceeds the limits of the step or of the tables.
        """
        if tables is not self._tables or settings is not self._settings:
            self._bind(tables, settings)
        plan = rows.plan
        num_rows = len(plan.samples)
        if not len(plan.slots) == len(plan.starts) == len(plan.counts) == 4 * num_rows:
            raise ValueError(
                f"step {plan.step}: columns of {len(plan.slots)}, {len(plan.starts)} and {len(plan.counts)} bytes;"
                f" expected {4 * num_rows} each, for {num_rows} rows"
            )
        length: int = self._fill(self.address, plan.slots, plan.starts, plan.counts, plan.samples, num_rows)
        if length < 0:
            row = -1 - length
            raise ValueError(
                f"step {plan.step}, row {row} of {num_rows}: slot {rows.slots[row]}, {rows.counts[row]} tokens from position"
                f" {rows.starts[row]}; there are {self.c.num_slots} slots of {self.c.slot_tokens_stride - 1} tokens, and a"
                f" step has at most {self.c.max_rows} rows and {self.c.max_tokens} tokens"
            )
        return length

    @contextmanager
    def with_outputs(self, tokens: Int) -> Iterator[None]:
        """Replace the step's output tokens within the context. tokens: indices into the step's tokens."""
        c, tokens = self.c, np.ascontiguousarray(tokens)
        saved = c.output_tokens
        try:
            c.num_outputs, c.output_tokens = len(tokens), tokens.ctypes.data
            yield
        finally:
            c.output_tokens = saved  # also if a signal handler raises: the next plan is written there

    def _bind(self, tables: SlotTables, settings: Settings | None) -> None:
        """Point the step at the tables. A worker uses the same tables in every step."""
        c, token_ids, block_table = self.c, tables.token_ids, tables.block_table
        assert token_ids.is_contiguous() and block_table.flags.c_contiguous, (
            "token_ids and block_table must be contiguous"
        )
        c.slot_tokens, c.slot_tokens_stride = token_ids.data_ptr(), token_ids.shape[1]
        _, c.num_slots, c.block_table_stride = block_table.shape
        c.block_table, c.slot_adapters = block_table.ctypes.data, tables.adapters.ctypes.data
        c.block_table_group_stride = c.num_slots * c.block_table_stride
        c.settings = None if settings is None else settings.ctypes.data
        self._tables, self._settings = tables, settings
