"""Drafts of slots with structured outputs.

A grammar often allows one continuation only, such as the name of the next property. These forced tokens are drafts of
almost certain acceptance ("jump-forward"). The text of other tokens is proposed by the configured drafter. A draft that
the grammar does not allow ends the drafts of its row.
"""

from __future__ import annotations

import numpy as np

from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import Grammars
from quintet.executor.speculation.drafters import Drafter, DraftRows
from quintet.executor.speculation.gram_index import Tokens

NO_TOKENS: Tokens = np.empty(0, np.int32)


class GrammarDrafts:
    """Combines the forced tokens of a worker's grammars with the tokens of a drafter."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._forced: dict[int, list[int]] = {}
        """Forced tokens of this step, of each slot with a grammar that can verify drafts."""

    def begin(self, slots: Int, most: Int) -> Int:
        """Return the number of forced tokens of each slot, at most ``most``: int64[N]. Call it once a step."""
        forced = self._forced = {}
        if self._grammars.is_used:
            for slot, limit in zip(slots.tolist(), most.tolist(), strict=True):
                tokens = self._grammars.forced(slot)
                if tokens is not None:
                    forced[slot] = tokens[:limit]
        return np.array([self.num_forced(slot) for slot in slots.tolist()], np.int64)

    def num_forced(self, slot: int) -> int:
        """Return the number of forced tokens of a slot in this step."""
        return len(self._forced.get(slot, ()))

    def propose(self, rows: DraftRows, drafter: Drafter) -> list[Tokens]:
        """Return the drafts of each row, as `Drafter.propose`. Rows with enough forced tokens need no drafter."""
        if not self._forced:
            return drafter.propose(rows)
        slots, counts = rows.slots.tolist(), rows.counts.tolist()
        asked = np.flatnonzero(
            [self.num_forced(slot) < most for slot, most in zip(slots, counts, strict=True)]
        )
        proposals = dict.fromkeys(range(len(slots)), NO_TOKENS)
        if len(asked):
            part = DraftRows(rows.slots[asked], rows.num_tokens[asked], rows.counts[asked])
            proposals.update(zip(asked.tolist(), drafter.propose(part), strict=True))
        return [
            self._merged(slot, most, proposals[row])
            for row, (slot, most) in enumerate(zip(slots, counts, strict=True))
        ]

    def _merged(self, slot: int, most: int, proposed: Tokens) -> Tokens:
        """Return the drafter's tokens if they begin with the forced ones, as far as they are allowed; else the forced ones."""
        forced = self._forced.get(slot)
        if forced is None:
            return proposed
        tokens = proposed.tolist()
        if tokens[: len(forced)] != forced:
            return np.array(forced[:most], np.int32)
        return proposed[: self._grammars.num_allowed(slot, tokens)]
