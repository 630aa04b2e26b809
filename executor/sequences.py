"""Build steps of whole sequences without a core: each sequence has its own slot and blocks, in slot order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.ragged import Int
from quintet.executor.slots import SlotTables
from quintet.wire.step import StepPlan

SequencePart = tuple[int, int, int]
"""A row: slot, first position, tokens."""


def place(tables: SlotTables, slot: int, tokens: torch.Tensor, width: int) -> None:
    """Put a sequence, int32 or int64 ``[tokens]``, into a free slot. width: blocks per sequence and group."""
    num_groups = len(tables.block_table)
    tables.token_ids[slot, : len(tokens)] = tokens.to(tables.device)
    tables.num_prompt_tokens[slot] = len(tokens)
    blocks = np.arange(num_groups * width, dtype=np.int32).reshape(num_groups, width)
    tables.block_table[:, slot, :width] = blocks + slot * num_groups * width


def plan_of_rows(slots: Int, starts: Int, counts: Int, draws: NDArray[np.bool_]) -> StepPlan:
    """Return a step without changes of tables. draws: whether each row draws a token."""
    return StepPlan(
        step=0,
        sent_ns=0,
        freed=b"",
        new_rows=[],
        blocks=b"",
        copies=b"",
        slots=slots.astype(np.int32).tobytes(),
        starts=starts.astype(np.int32).tobytes(),
        counts=counts.astype(np.int32).tobytes(),
        samples=draws.astype(np.uint8).tobytes(),
    )


def plan_of_parts(rows: Sequence[SequencePart], draws: bool) -> StepPlan:
    """Return a step of these rows; ``draws``: whether each row draws a token."""
    slots, starts, counts = np.array(rows, np.int64).reshape(-1, 3).T
    return plan_of_rows(slots, starts, counts, np.full(len(rows), draws))
