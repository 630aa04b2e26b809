"""Slot tables follow the plans; flat index arithmetic at its edges."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, new_row

from quintet.executor.ragged import RaggedTable, ranges
from quintet.executor.slots import SlotTables
from quintet.executor.table_audit import TablesDiffer, check_tables
from quintet.wire.codec import pack_i32, pack_i64
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan


def plan(**columns: object) -> StepPlan:
    empty = dict.fromkeys(("freed", "blocks", "copies", "slots", "starts", "counts", "samples"), b"")
    return StepPlan(**{"step": 1, "sent_ns": 0, "new_rows": [], **empty, **columns})


def test_ranges() -> None:
    rows, values = ranges(np.array([5, 0, 7, 2]), np.array([2, 0, 3, 1]))
    assert rows.tolist() == [0, 0, 2, 2, 2, 3]
    assert values.tolist() == [5, 6, 7, 8, 9, 2]


def test_ragged_table_widens_and_replaces() -> None:
    table = RaggedTable(4, np.int64)
    table.put(1, [1, 2, 3])
    table.put(3, list(range(20)))
    table.put(3, [9])
    rows, values = table.take(np.array([3, 0, 1]))
    assert rows.tolist() == [0, 2, 2, 2]
    assert values.tolist() == [9, 1, 2, 3]


def test_plans_change_the_tables_in_order() -> None:
    tables = SlotTables(4, 16, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
    first = new_row(2, Drawer(SamplingParams(), prompt=[5, 6], outputs=[7]))
    tables.apply(plan(new_rows=[first], blocks=pack_i32([2, 0, 0, 11, 2, 0, 1, 12])))
    assert tables.token_ids[2, :3].tolist() == [5, 6, 7]
    assert tables.num_prompt_tokens[2] == 2
    assert tables.block_table[0, 2, :2].tolist() == [11, 12]
    assert [tables.generation(slot) for slot in range(4)] == [None, None, 1, None]

    second = new_row(2, Drawer(SamplingParams(), prompt=[8]))
    second.generation = 2
    tables.apply(plan(freed=pack_i32([2]), new_rows=[second], blocks=pack_i32([2, 0, 0, 3])))
    assert tables.generation(2) == 2, "a slot is freed before the next request takes it"
    assert tables.token_ids[2, 0] == 8
    assert tables.block_table[0, 2, 0] == 3

    tables.apply(plan(blocks=pack_i32([2, 0, 0, 4])))
    assert tables.block_table[0, 2, 0] == 4, "entries must be replaceable"

    tables.reset()
    assert not tables.num_active_slots


def test_an_audited_plan_checks_the_tables() -> None:
    tables = SlotTables(4, 16, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
    audited = plan(
        new_rows=[new_row(2, Drawer(SamplingParams(), prompt=[5, 6, 7, 8, 9]))],
        blocks=pack_i32([2, 0, 0, 11, 2, 0, 1, 12, 2, 0, 2, 13]),
        slots=pack_i32([2]),
        starts=pack_i32([0]),
        counts=pack_i32([5]),
        samples=b"\1",
        checksum=crc32(pack_i32([11, 12]), crc32(pack_i64([2, 1]))),
    )
    tables.apply(audited)
    check_tables(audited, tables)
    tables.block_table[0, 2, 1] = 99
    with pytest.raises(TablesDiffer, match="step 1"):
        check_tables(audited, tables)
