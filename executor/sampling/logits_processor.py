"""What a sampling concern is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.slots import SlotTables
from quintet.wire.step import NewRow

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The rows that draw in this step, as host columns int64[S]; token values are in ``tables``."""

    tables: SlotTables
    slots: Int
    lengths: Int
    """Tokens each row has: the position its draw will take."""
    num_prompt: Int
    """How many of them are prompt."""

    def take(self, which: Int) -> DrawRows:
        """Return a subset of the rows."""
        return DrawRows(self.tables, self.slots[which], self.lengths[which], self.num_prompt[which])


class LogitsProcessor(Protocol):
    """One reason to change logits. Keeps, per slot, what the slot's tenant asked for."""

    def admit(self, row: NewRow) -> bool:
        """Remember what a new tenant asks for. Return whether it asks for anything here."""

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """Change, in place, the rows ``which`` of ``logits [S, vocab]`` fp32. Called only when there are some."""


def valid_ids(ids: list[int], vocab_size: int) -> list[int]:
    """Return the ids the model has a logit for."""
    return [token for token in ids if 0 <= token < vocab_size]
