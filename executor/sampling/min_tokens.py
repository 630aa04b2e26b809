"""``min_tokens``: block stop tokens until the request has this many outputs."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import RaggedTable
from quintet.executor.sampling.logits_processor import DrawRows, Int, valid_ids
from quintet.wire.step import NewRow


class MinTokens:
    """Sets the logits of a request's stop ids to -inf."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._least = np.zeros(max_num_seqs, np.int64)
        self._stop_ids = RaggedTable(max_num_seqs, np.int64)

    def admit(self, row: NewRow) -> bool:
        """See `LogitsProcessor.admit`."""
        if row.params.min_tokens == 0 or not row.stop_ids:
            return False
        self._least[row.slot] = row.params.min_tokens
        self._stop_ids.put(row.slot, valid_ids(row.stop_ids, self._vocab_size))
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `LogitsProcessor.apply`."""
        outputs = (rows.lengths - rows.num_prompt)[which]
        which = which[outputs < self._least[rows.slots[which]]]
        if len(which):
            owners, ids = self._stop_ids.take(rows.slots[which])
            at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
            logits.index_put_(at, logits.new_tensor(-torch.inf))
