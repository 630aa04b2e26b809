"""Recurrent states before each draft token of a step.

A step overwrites the recurrent state of each row. For a row with drafts, it also saves the state before each draft, in
blocks after those of the core. The state before the first rejected draft then replaces the row's state.

    row       t5    d6    d7    d8
    state        s6    s7    s8    s9     s6, s7 and s8 are saved; s9 is written to the row's block
    draws     t6    t7    t8    t9        d6 = t6, d7 ≠ t7: s7 replaces s9

Saved states are numbered in the order of the step's drafts. Recomputing the accepted tokens in the next step would need
no memory. But then the state would lag behind the tokens that the core knows, and checkpoints with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quintet.executor.kv_memory import KvMemory
from quintet.executor.slots import SlotTables


class DraftStates:
    """Draft states of a worker."""

    def __init__(self, tables: SlotTables, kv: KvMemory, copy: Callable[[bytes], None]) -> None:
        """copy: copies blocks on all ranks (`quintet.wire.step.StepPlan.copies`)."""
        self._tables, self._copy = tables, copy
        self.num_states = kv.num_draft_states
        self._first_blocks = {
            index: kv.draft_block(index) for index, group in enumerate(tables.kv.groups) if group.is_state
        }

    def restore(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Replace the states after rejected drafts.

        rows: slot, number of drafts and of accepted drafts, of each row with drafts, in the order of the step.
        """
        pairs: list[tuple[int, int]] = []
        begin = 0
        for slot, num_drafts, num_accepted in rows:
            if num_accepted < num_drafts:
                pairs += (
                    (first + begin + num_accepted, int(self._tables.block_table[group, slot, 1]))
                    for group, first in self._first_blocks.items()
                )
            begin += num_drafts
        if pairs:
            self._copy(np.array(pairs, np.int32).tobytes())
