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
        self._heap: list[tuple[int, int, ItemT]] = []
        self._order = itertools.count()
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        """Return the number of entries, including ended ones that were not swept yet."""
        return len(self._heap)

    @property
    def first_ns(self) -> int | None:
        """The earliest deadline; None without entries."""
        return self._heap[0][0] if self._heap else None

    def watch(self, deadline_ns: int, item: ItemT) -> None:
        """Watch an item until it ends or is due."""
        heappush(self._heap, (deadline_ns, next(self._order), item))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not self._has_ended(entry[2])]
            heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def due(self, now_ns: int) -> list[ItemT]:
        """Return, once, the items that have not ended by their deadline, the earliest first."""
        heap = self._heap
        due: list[ItemT] = []
        while heap and heap[0][0] <= now_ns:
            item = heappop(heap)[2]
            if not self._has_ended(item):
                due.append(item)
        return due
