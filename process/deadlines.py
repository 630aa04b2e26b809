"""Heap of items by deadline, the earliest first. Reads no clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

_MIN_SWEEP = 256
"""Number of entries below which ended items are not swept."""


class DeadlineHeap(Generic[ItemT]):
    """Watched items that have not ended according to ``has_ended``. Most end long before their deadline."""

    def __init__(self, has_ended: Callable[[ItemT], bool]) -> None:
        self._has_ended = has_ended
        self.entries: list[tuple[int, int, ItemT]] = []
        """A heap of deadline, number and item; includes ended items that were not swept yet."""
        self._order = itertools.count()
        self._sweep_at = _MIN_SWEEP

    @property
    def first_ns(self) -> int | None:
        """The earliest deadline; None without entries."""
        return self.entries[0][0] if self.entries else None

    def watch(self, deadline_ns: int, item: ItemT) -> None:
        """Watch an item until it ends or is due."""
        heappush(self.entries, (deadline_ns, next(self._order), item))
        if len(self.entries) >= self._sweep_at:
            self.entries = [entry for entry in self.entries if not self._has_ended(entry[2])]
            heapify(self.entries)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self.entries))

    def due(self, now_ns: int) -> list[ItemT]:
        """Return, once, the items that have not ended by their deadline, the earliest first."""
        heap = self.entries
        due: list[ItemT] = []
        while heap and heap[0][0] <= now_ns:
            item = heappop(heap)[2]
            if not self._has_ended(item):
                due.append(item)
        return due
