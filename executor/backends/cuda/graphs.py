"""Which decode steps run as captured graphs: their padded sizes, when each is captured, and what happens where one cannot be.

A server is ready before any graph is: steps are launched kernel by kernel until the graph of their size exists. Graphs are
captured one at a time between steps, the largest first, so that the smaller ones fit into the memory of the pool that
the largest took. Ranks of one model have the same graphs: each is kept by all, or by none. Owns no tensor.
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

    def __init__(
        self,
        max_num_seqs: int,
        capture: Callable[[int], GraphT],
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """``capture`` makes the graph of so many rows; it may raise `torch.OutOfMemoryError`.

        agree: of one of several ranks, called behind each capture with whether it has the graph; returns whether all have.
        """
        self._sizes = padded_sizes(max_num_seqs)
        self._missing = list(self._sizes)
        self._graphs: dict[int, GraphT] = {}
        self._capture = capture
        self._agree = agree

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

    def of_size(self, size: int) -> GraphT | None:
        """Return the graph of this padded size, if it was captured."""
        return self._graphs.get(size)

    def capture_one(self) -> None:
        """Capture the largest graph that is missing. The first that does not fit into memory ends it for all smaller ones."""
        size = self._missing.pop()
        graph, problem = self._try(size)
        is_captured = graph is not None
        if not (is_captured if self._agree is None else self._agree(is_captured)):
            log.warning(
                "graphs of %s rows are not captured, their steps are launched one kernel at a time: %s;"
                " lower --gpu-memory-utilization to leave room for them",
                ", ".join(map(str, [*self._missing, size])),
                problem or "memory of another rank's device is too little",
            )
            self._missing.clear()
            return
        assert graph is not None, size
        self._graphs[size] = graph
        if not self._missing:
            log.info(
                "decode steps of up to %d rows run as captured graphs (%d)",
                self._sizes[-1],
                len(self._graphs),
            )

    def _try(self, size: int) -> tuple[GraphT | None, str]:
        """Return the graph of this size, or None and why there is none. Nothing of an attempt is kept alive by its error."""
        try:
            return self._capture(size), ""
        except torch.OutOfMemoryError as error:
            return None, str(error).splitlines()[0]
