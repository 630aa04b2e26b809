"""``logit_bias``: add values to the logits of given tokens."""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import RaggedTable
from quintet.executor.sampling.logits_processor import DrawRows, Int
from quintet.wire.step import NewRow


class LogitBias:
    """Adds each bias to its token's logit."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids = RaggedTable(max_num_seqs, np.int64)
        self._biases = RaggedTable(max_num_seqs, np.float32)

    def admit(self, row: NewRow) -> bool:
        """See `LogitsProcessor.admit`."""
        given = row.params.logit_bias or {}
        biases = {token: bias for token, bias in given.items() if 0 <= token < self._vocab_size}
        if not biases:
            return False
        self._ids.put(row.slot, list(biases))
        self._biases.put(row.slot, list(biases.values()))
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `LogitsProcessor.apply`."""
        owners, ids = self._ids.take(rows.slots[which])
        _, biases = self._biases.take(rows.slots[which])
        at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
        logits.index_put_(at, to_device(biases, logits.device), accumulate=True)
