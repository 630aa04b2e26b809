"""The debug check that the executor's tables mirror the core's: `SchedulerConfig.audit`."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from quintet.executor.slots import SlotTables
from quintet.wire.step import StepPlan


class TablesDiffer(Exception):
    """The tables are not what the core believes them to be: a delta was lost, doubled or misapplied."""


def table_checksum(plan: StepPlan, tables: SlotTables) -> int:
    """Return the CRC-32 of what a plan's rows read, after its deltas.

    Over its rows, in order: slot and generation (int64), then the blocks (int32) that cover the row's first
    ``start + count`` tokens.
    """
    slots = np.frombuffer(plan.slots, np.int32)
    ends = np.frombuffer(plan.starts, np.int32) + np.frombuffer(plan.counts, np.int32)
    checksum = 0
    for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
        checksum = crc32(np.array([slot, tables.generations[slot]], np.int64).tobytes(), checksum)
        checksum = crc32(tables.block_table[slot, : -(-end // tables.block_size)].tobytes(), checksum)
    return checksum


def check_tables(plan: StepPlan, tables: SlotTables) -> None:
    """Raise `TablesDiffer` unless the plan's checksum, if it has one, is that of the tables."""
    if plan.checksum and plan.checksum != (found := table_checksum(plan, tables)):
        slots = np.frombuffer(plan.slots, np.int32)
        raise TablesDiffer(
            f"step {plan.step}: the tables' checksum is {found}, the core expects {plan.checksum};"
            f" slots {slots.tolist()} of generations {tables.generations[slots].tolist()}"
        )
