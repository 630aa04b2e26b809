"""Which decode steps run as captured graphs: their padded sizes, when each is captured, and what happens where one cannot be.

A server is ready before any graph is: steps are launched kernel by kernel until the graph of their size exists. Graphs are
captured one at a time between steps, the largest first, so that the smaller ones fit into the memory of the pool that
the largest took. Owns no tensor.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

GraphT = TypeVar("GraphT")

log = logging.getLogger("quintet")

FINE = 8
"""Multiples of this are captured up to `COARSE_FROM`, and of `COARSE` beyond: from 64 rows on padding adds an eighth at most."""
COARSE_FROM = 256
COARSE = 32


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, ascending; the last holds ``max_num_seqs``."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = FINE
    while size < max_num_seqs:
        sizes.append(size)
        size += FINE if size < COARSE_FROM else COARSE
    return [*sizes, max_num_seqs]


class DecodeGraphs(Generic[GraphT]):
    """The graphs captured so far, by padded size."""

    def __init__(self, max_num_seqs: int, capture: Callable[[int], GraphT]) -> None:
        """``capture`` makes the graph of so many rows; it may raise `torch.OutOfMemoryError`."""
        self._sizes = padded_sizes(max_num_seqs)
        self._missing = list(self._sizes)
        self._graphs: dict[int, GraphT] = {}
        self._capture = capture

    @property
    def num_missing(self) -> int:
        """Graphs that may still be captured."""
        return len(self._missing)

    def find(self, num_rows: int) -> GraphT | None:
        """Return the smallest captured graph that holds so many rows, or None.

        One size up is taken while the best one is missing, no more: padding beyond it costs more than launching.
        """
        first = bisect.bisect_left(self._sizes, num_rows)
        for size in self._sizes[first : first + 2]:
            graph = self._graphs.get(size)
            if graph is not None:
                return graph
        return None

    def capture_one(self) -> None:
        """Capture the largest graph that is missing. The first that does not fit into memory ends it for all smaller ones."""
        size = self._missing.pop()
        try:
            self._graphs[size] = self._capture(size)
        except torch.OutOfMemoryError as error:
            log.warning(
                "graphs of %s rows are not captured, their steps are launched one kernel at a time: %s;"
                " lower --gpu-memory-utilization to leave room for them",
                ", ".join(map(str, [*self._missing, size])),
                str(error).splitlines()[0],
            )
            self._missing.clear()
            return
        if not self._missing:
            log.info(
                "decode steps of up to %d rows run as captured graphs (%d)",
                self._sizes[-1],
                len(self._graphs),
            )
