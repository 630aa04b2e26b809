"""Comparison of the slot tables with the core's: a debug check, `SchedulerConfig.audit`. Only audited plans have a checksum."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from quintet.executor.slots import SlotTables
from quintet.wire.step import StepPlan


class TablesDiffer(Exception):
    """The tables differ from the core's: a delta was lost, duplicated or misapplied."""


def table_checksum(plan: StepPlan, tables: SlotTables) -> int:
    """Return the CRC-32 of the tables that a plan's rows read, after its deltas.

    It covers the rows in order: slot and generation (int64; the slot alone if it is free). Then, for each group, the
    blocks (int32) that the row reads and writes (`KvGroup.used`).
    """
    slots, starts, counts = (
        np.frombuffer(column, np.int32).tolist() for column in (plan.slots, plan.starts, plan.counts)
    )
    groups, block_size = tables.kv.groups, tables.kv.block_size
    checksum = 0
    for slot, start, count in zip(slots, starts, counts, strict=True):
        generation = tables.generation(slot)
        row = [slot] if generation is None else [slot, generation]
        checksum = crc32(np.array(row, np.int64).tobytes(), checksum)
        for group, table in zip(groups, tables.block_table[:, slot], strict=True):
            used = group.used(start, start + count, block_size)
            checksum = crc32(table[used.start : used.stop].tobytes(), checksum)
    return checksum


def check_tables(plan: StepPlan, tables: SlotTables) -> None:
    """Raise `TablesDiffer` if the tables' checksum differs from the plan's."""
    found = table_checksum(plan, tables)
    if plan.checksum != found:
        slots = np.frombuffer(plan.slots, np.int32)
        raise TablesDiffer(
            f"step {plan.step}: the tables' checksum is {found}, the core expects {plan.checksum};"
            f" slots {slots.tolist()} of generations {[tables.generation(slot) for slot in slots]}"
        )
