"""Interface of a logits processor."""

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
    """The rows that draw in this step, as host columns int64[S]; token ids are in ``tables``."""

    tables: SlotTables
    slots: Int
    lengths: Int
    """Number of tokens of each row: the position of its draw."""
    num_prompt: Int
    """Number of prompt tokens of each row."""

    def take(self, which: Int) -> DrawRows:
        """Return a subset of the rows."""
        return DrawRows(self.tables, self.slots[which], self.lengths[which], self.num_prompt[which])


class LogitsProcessor(Protocol):
    """Changes logits for one feature. Keeps the feature's parameters per slot."""

    def admit(self, row: NewRow) -> bool:
        """Store the parameters of a slot's new request. Return whether the request uses this feature."""

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """Change the rows ``which`` of ``logits [S, vocab]`` fp32 in place. ``which`` is not empty."""


def valid_ids(ids: list[int], vocab_size: int) -> list[int]:
    """Return the ids within the vocabulary."""
    return [token for token in ids if 0 <= token < vocab_size]
