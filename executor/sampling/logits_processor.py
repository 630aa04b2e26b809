"""Interface of a logits processor, and the processors of token ids that a request names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.ragged import RaggedTable, ranges
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


class AllowedIds:
    """``allowed_token_ids``: sets every other logit to -inf."""

    def __init__(self, max_num_seqs: int) -> None:
        self._ids = RaggedTable(max_num_seqs, np.int64)

    def admit(self, row: NewRow) -> bool:
        if row.params.allowed_token_ids is None:
            return False
        self._ids.put(row.slot, row.params.allowed_token_ids)
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        owners, ids = self._ids.take(rows.slots[which])
        at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
        kept = logits[at]
        logits.index_fill_(0, to_device(which, logits.device), -torch.inf)
        logits.index_put_(at, kept)


class BadWords:
    """``bad_words``: blocks the last token of a sequence after the preceding ones.

    As in vLLM, the preceding tokens must all be outputs: a sequence that starts in the prompt is not matched. One gather compares
    all prefixes of all rows' words with the newest tokens.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._tokens = RaggedTable(max_num_seqs, np.int64)
        """The words of a slot, concatenated."""
        self._sizes = RaggedTable(max_num_seqs, np.int64)
        """Tokens of each word."""

    def admit(self, row: NewRow) -> bool:
        if not row.bad_word_ids:
            return False
        self._tokens.put(row.slot, [token for word in row.bad_word_ids for token in word])
        self._sizes.put(row.slot, [len(word) for word in row.bad_word_ids])
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        device = logits.device
        chosen = rows.take(which)
        _, flat = self._tokens.take(chosen.slots)
        owners, sizes = self._sizes.take(
            chosen.slots
        )  # of each word: its row in `chosen`, its number of tokens
        ends = np.cumsum(sizes)
        fits = sizes - 1 <= (chosen.lengths - chosen.num_prompt)[owners]
        last_tokens = flat[ends - 1]

        # the prefix tokens of every word that fits, and the tokens to compare them with
        words, at = ranges((ends - sizes)[fits], (sizes - 1)[fits])
        rows_of = owners[fits][words]
        back = ends[fits][words] - 1 - at  # 1 for the token just before the last
        seen = chosen.tables.token_ids[
            to_device(chosen.slots[rows_of], device), to_device(chosen.lengths[rows_of] - back, device)
        ]
        differs = (seen != to_device(flat[at], device)).to(torch.int32)
        mismatches = torch.zeros(int(fits.sum()), dtype=torch.int32, device=device)
        mismatches.index_add_(0, to_device(words, device), differs)

        rows_hit = to_device(which[owners[fits]], device)
        tokens_hit = to_device(last_tokens[fits], device)
        penalty = torch.where(mismatches == 0, -torch.inf, 0.0)
        logits.index_put_((rows_hit, tokens_hit), penalty, accumulate=True)


class LogitBias:
    """``logit_bias``: adds each bias to its token's logit."""

    def __init__(self, max_num_seqs: int) -> None:
        self._ids = RaggedTable(max_num_seqs, np.int64)
        self._biases = RaggedTable(max_num_seqs, np.float32)

    def admit(self, row: NewRow) -> bool:
        biases = row.params.logit_bias
        if not biases:
            return False
        self._ids.put(row.slot, list(biases))
        self._biases.put(row.slot, list(biases.values()))
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        owners, ids = self._ids.take(rows.slots[which])
        _, biases = self._biases.take(rows.slots[which])
        at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
        logits.index_put_(at, to_device(biases, logits.device), accumulate=True)


class MinTokens:
    """``min_tokens``: sets the logits of a request's stop ids to -inf until it has this many outputs."""

    def __init__(self, max_num_seqs: int) -> None:
        self._least = np.zeros(max_num_seqs, np.int64)
        self._stop_ids = RaggedTable(max_num_seqs, np.int64)

    def admit(self, row: NewRow) -> bool:
        if row.params.min_tokens == 0 or not row.stop_ids:
            return False
        self._least[row.slot] = row.params.min_tokens
        self._stop_ids.put(row.slot, row.stop_ids)
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        outputs = (rows.lengths - rows.num_prompt)[which]
        which = which[outputs < self._least[rows.slots[which]]]
        if len(which):
            owners, ids = self._stop_ids.take(rows.slots[which])
            at = (to_device(which[owners], logits.device), to_device(ids, logits.device))
            logits.index_put_(at, logits.new_tensor(-torch.inf))
