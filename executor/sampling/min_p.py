"""``min_p``: drops tokens less likely than this share of the most likely one (Nguyen et al., "Turning up the heat", 2024)."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.concern import DrawRows, Int
from quintet.executor.sampling.cut import cut_below
from quintet.wire.step import NewRow


class MinP:
    """Compares logits rather than probabilities: ``p >= min_p * p_max`` is ``logit >= logit_max + log(min_p)``."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._log_min_p = np.zeros(max_num_seqs, np.float32)

    def admit(self, row: NewRow) -> bool:
        """See `Concern.admit`."""
        if row.params.min_p == 0.0:
            return False
        self._log_min_p[row.slot] = np.log(row.params.min_p)
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `Concern.apply`."""
        log_min_p = to_device(self._log_min_p[rows.slots[which]], logits.device)
        cut_below(logits, which, lambda chosen: chosen.amax(dim=-1) + log_min_p)
