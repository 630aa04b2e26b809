"""``allowed_token_ids``: restrict the draw to these tokens."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import RaggedTable
from quintet.executor.sampling.logits_processor import DrawRows, Int, valid_ids
from quintet.wire.step import NewRow


class AllowedIds:
    """Sets every other logit to -inf."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids = RaggedTable(max_num_seqs, np.int64)

    def admit(self, row: NewRow) -> bool:
        """See `LogitsProcessor.admit`."""
        if row.params.allowed_token_ids is None:
            return False
        self._ids.put(row.slot, valid_ids(row.params.allowed_token_ids, self._vocab_size))
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `LogitsProcessor.apply`."""
        owners, ids = self._ids.take(rows.slots[which])
        at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
        kept = logits[at]
        logits.index_fill_(0, to_device(which, logits.device), -torch.inf)
        logits.index_put_(at, kept)
