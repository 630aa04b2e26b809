"""``temperature``: divides the logits."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.concern import DrawRows, Int
from quintet.wire.step import NewRow


class Temperature:
    """Applied to rows that draw at random; greedy rows (temperature 0) never come here."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._temperatures = np.ones(max_num_seqs, np.float32)

    def admit(self, row: NewRow) -> bool:
        """See `Concern.admit`."""
        self._temperatures[row.slot] = row.params.temperature
        return row.params.temperature != 1.0

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `Concern.apply`. Dividing the other rows by 1 changes nothing, and needs no copy."""
        logits.div_(to_device(self._temperatures[rows.slots], logits.device).unsqueeze(1))
