"""Repetition, presence and frequency penalties.

``repetition`` (Keskar et al., "CTRL", 2019) divides positive and multiplies negative logits of every token in prompt
or output. ``presence`` and ``frequency`` (the OpenAI API) subtract once, or once per occurrence, for tokens of the
output.

No counts are stored. The token table holds the tokens, and updating their few logits costs less than a pass over a
count table as wide as the vocabulary. So preemption and recovery need no update.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import ranges
from quintet.executor.sampling.logits_processor import DrawRows, Int
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow

NO_PENALTIES = 1.0, 0.0, 0.0


def penalties_of(params: SamplingParams) -> tuple[float, float, float]:
    """Return the repetition, presence and frequency penalty."""
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty


class Penalties:
    """One `LogitsProcessor` for all three penalties, because they read the same tokens."""

    def __init__(self, max_num_seqs: int) -> None:
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)

    def admit(self, row: NewRow) -> bool:
        slot, penalties = row.slot, penalties_of(row.params)
        self._repetition[slot], self._presence[slot], self._frequency[slot] = penalties
        return penalties != NO_PENALTIES

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        repeats = which[self._repetition[rows.slots[which]] != 1.0]
        if len(repeats):
            owners, at = _tokens(logits, rows, repeats, rows.tables.num_embedded[rows.slots[repeats]])
            factor = to_device(self._repetition[rows.slots[repeats]][owners], logits.device)
            values = logits[at]
            # a repeated token is written twice with the same value
            logits.index_put_(at, torch.where(values > 0, values / factor, values * factor))
        slots = rows.slots[which]
        counts = which[(self._presence[slots] != 0.0) | (self._frequency[slots] != 0.0)]
        if len(counts):
            owners, at = _tokens(logits, rows, counts, rows.num_prompt[counts])
            frequency = to_device(self._frequency[rows.slots[counts]][owners], logits.device)
            presence = to_device(self._presence[rows.slots[counts]][owners], logits.device)
            logits.index_put_(at, frequency.neg_(), accumulate=True)
            logits.index_put_(at, logits[at] - presence)


def _tokens(
    logits: torch.Tensor, rows: DrawRows, which: Int, firsts: Int
) -> tuple[Int, tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each token from its row's ``firsts`` on, the index in ``which`` and the position of its logit."""
    device = logits.device
    owners, positions = ranges(firsts, rows.lengths[which] - firsts)
    tokens = rows.tables.token_ids[to_device(rows.slots[which][owners], device), to_device(positions, device)]
    return owners, (to_device(which[owners], device), tokens)
