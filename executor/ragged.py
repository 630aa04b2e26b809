"""Rows of different lengths in vector operations: flat index arithmetic, and a table of lists per slot.

Used to access all tokens or all stop ids of many rows in one operation.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
NumberT = TypeVar("NumberT", np.int64, np.float32)


def ranges(starts: Int, counts: Int) -> tuple[Int, Int]:
    """Concatenate ``arange(start, start + count)`` of every row.

    Returns ``(rows, values)``, both of the summed length: the row index of each value, and the value.
    """
    rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    ends = np.cumsum(counts)
    offsets = np.arange(len(rows), dtype=np.int64) - np.repeat(ends - counts, counts)
    return rows, offsets + np.repeat(starts, counts)


class RaggedTable(Generic[NumberT]):
    """One list of numbers per slot, in a padded table as wide as the longest list so far.

    The first `put` allocates it, so an unused feature costs nothing.
    """

    def __init__(self, num_slots: int, dtype: type[NumberT]) -> None:
        self._lengths = np.zeros(num_slots, np.int64)
        self._table: NDArray[NumberT] = np.zeros((num_slots, 0), dtype)

    def put(self, slot: int, values: list[int] | list[float]) -> None:
        """Replace the list of one slot."""
        width = self._table.shape[1]
        if len(values) > width:
            wider = max(len(values), 2 * width, 8)
            self._table = np.pad(self._table, ((0, 0), (0, wider - width)))
        self._table[slot, : len(values)] = values
        self._lengths[slot] = len(values)

    def take(self, slots: Int) -> tuple[Int, NDArray[NumberT]]:
        """Return ``(rows, values)`` of the lists of ``slots``, flat; ``rows`` indexes into ``slots``."""
        lengths = self._lengths[slots]
        rows, columns = ranges(np.zeros(len(slots), np.int64), lengths)
        return rows, self._table[slots[rows], columns]
