"""``bad_words``: block the last token of a sequence after the preceding ones.

As in vLLM, the preceding tokens must all be outputs: a sequence that starts in the prompt is not matched.
"""

from __future__ import annotations

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.ragged import RaggedTable, ranges
from quintet.executor.sampling.logits_processor import DrawRows, Int, valid_ids
from quintet.wire.step import NewRow


class BadWords:
    """Compares all prefixes of all rows' words with the newest tokens in one gather."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens = RaggedTable(max_num_seqs, np.int64)
        """The words of a slot, concatenated."""
        self._sizes = RaggedTable(max_num_seqs, np.int64)
        """Tokens of each word."""

    def admit(self, row: NewRow) -> bool:
        """See `LogitsProcessor.admit`."""
        words = [
            word for word in row.bad_word_ids if word and len(valid_ids(word, self._vocab_size)) == len(word)
        ]
        if not words:
            return False
        self._tokens.put(row.slot, [token for word in words for token in word])
        self._sizes.put(row.slot, [len(word) for word in words])
        return True

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """See `LogitsProcessor.apply`."""
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
