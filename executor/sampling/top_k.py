"""``top_k``: keeps the k most likely tokens (Fan et al., "Hierarchical neural story generation", 2018)."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.concern import DrawRows, Int
from quintet.executor.sampling.cut import cut_below
from quintet.wire.step import NewRow


class TopK:
    """Cuts below the k-th largest logit."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._k = np.zeros(max_num_seqs, np.int64)

    def admit(self, row: NewRow) -> bool:
        """See `Concern.admit`."""
        self._k[row.slot] = row.params.top_k
        return 0 < row.params.top_k < self._vocab_size

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `Concern.apply`."""
        k = self._k[rows.slots[which]]
        last = to_device(k - 1, logits.device).unsqueeze(1)
        cut_below(logits, which, lambda chosen: chosen.topk(int(k.max())).values.gather(1, last).squeeze(1))
