"""As many drafts as allowed. Otherwise their number depends on measured times."""

from __future__ import annotations

from typing import Any

import numpy as np

from quintet.executor.ragged import Int
from quintet.executor.speculation.lengths import DraftCounts, DraftLengths


def choice_of(slots: Int, counts: Int) -> DraftCounts:
    """Return a choice of these numbers of drafts, all of which are expected to pay."""
    return DraftCounts(
        slots, counts, np.zeros(len(slots)), np.zeros(len(slots), np.bool_), 0.0, is_first=False
    )


class LongestDrafts(DraftLengths):
    """Chooses as many drafts as allowed; otherwise their number depends on measured times."""

    def is_due(self, *, has_forced: bool = False) -> bool:
        return True

    def choose(self, slots: Int, most: Int, *_: object) -> DraftCounts:
        return choice_of(slots, most.copy())


def drafting(worker: Any) -> Any:
    """Make a worker propose the maximum number of drafts."""
    assert worker._speculation is not None
    worker._speculation._lengths = LongestDrafts(len(worker.tables.token_ids))
    return worker
