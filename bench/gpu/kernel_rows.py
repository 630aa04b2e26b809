"""Build the rows of a step for a single kernel: requests of equal length, with blocks in random order."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu.shapes import BLOCK_SIZE
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.tables import StagingLayout, apply_plan, pack_staging
from quintet.executor.backends.cuda.tables import DeviceTables, StepMemory, StepRows
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.kv_spec import full_layers
from quintet.wire.step import StepPlan


def blocks_for(num_rows: int, length: int) -> int:
    """Return the number of blocks of ``num_rows`` rows of this length."""
    return num_rows * -(-length // BLOCK_SIZE)


def step_rows(device: Device, num_rows: int, start: int, count: int) -> StepRows:
    """Return rows with ``start`` tokens in the cache and ``count`` new ones; the cache has exactly their blocks."""
    length = start + count
    num_blocks, columns = blocks_for(num_rows, length), -(-length // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(num_blocks)
    entries = [
        (row, 0, column, int(order[row * columns + column]))
        for row in range(num_rows)
        for column in range(columns)
    ]
    plan = StepPlan(
        step=1,
        sent_ns=0,
        freed=b"",
        new_rows=[],
        blocks=pack_i32([value for entry in entries for value in entry]),
        copies=b"",
        slots=pack_i32(range(num_rows)),
        starts=pack_i32([start] * num_rows),
        counts=pack_i32([count] * num_rows),
        samples=pack_u8([1] * num_rows),
    )
    tables = DeviceTables.reserve(num_rows, length, full_layers(1, 1, 8, 2, BLOCK_SIZE), device.torch_device)
    memory = StepMemory(tables, num_rows * count)
    layout = StagingLayout.of(tables, num_blocks)
    words = np.zeros(layout.num_words(plan), np.int32)
    packed = pack_staging(plan, layout, words)
    rows = memory.rows(packed.num_rows, packed.num_tokens, packed.max_count)
    staging = torch.from_numpy(words[: packed.num_words]).to(device.torch_device)
    apply_plan(device, staging, tables, rows, memory.sampled(num_rows))
    device.synchronize()
    return rows.of_group(0)
