"""Captured graphs of decode steps: padded sizes and capture order.

The server is ready before any graph: steps run eagerly until the graph of their size exists. Graphs are captured one at a time
between steps, largest first, so that smaller ones reuse the pool memory of the largest. All ranks of a model keep the same
graphs. Owns no tensor.
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
"""Graph sizes are multiples of this up to `COARSE_FROM`, then of `COARSE`. From 64 rows, padding adds at most one eighth."""
COARSE_FROM = 256
COARSE = 32


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Return the graph sizes in rows, ascending; the last is ``max_num_seqs``."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = FINE
    while size < max_num_seqs:
        sizes.append(size)
        size += FINE if size < COARSE_FROM else COARSE
    return [*sizes, max_num_seqs]


class DecodeGraphs(Generic[GraphT]):
    """Captured graphs by padded size."""

    def __init__(
        self,
        max_num_seqs: int,
        capture: Callable[[int], GraphT],
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """capture: returns the graph of a number of rows; may raise `torch.OutOfMemoryError`.

        agree: with several ranks, called after each capture with this rank's success; returns whether all ranks succeeded.
        """
        self._sizes = padded_sizes(max_num_seqs)
        self._missing = list(self._sizes)
        self._graphs: dict[int, GraphT] = {}
        self._capture = capture
        self._agree = agree

    @property
    def num_missing(self) -> int:
        """Number of graphs left to capture."""
        return len(self._missing)

    def find(self, num_rows: int) -> GraphT | None:
        """Return the captured graph for this number of rows, or None.

        If the best size is missing, the next one is used. Padding beyond that costs more than an eager step.
        """
        first = bisect.bisect_left(self._sizes, num_rows)
        for size in self._sizes[first : first + 2]:
            graph = self._graphs.get(size)
            if graph is not None:
                return graph
        return None

    def of_size(self, size: int) -> GraphT | None:
        """Return the graph of exactly this padded size, or None."""
        return self._graphs.get(size)

    def capture_one(self) -> None:
        """Capture the largest missing graph. If it does not fit in memory, no further graph is captured."""
        size = self._missing.pop()
        graph, problem = self._try(size)
        is_captured = graph is not None
        if not (is_captured if self._agree is None else self._agree(is_captured)):
            log.warning(
                "graphs: steps of %s rows run eagerly, because a graph could not be captured: %s;"
                " lower --gpu-memory-utilization to leave memory for graphs",
                ", ".join(map(str, [*self._missing, size])),
                problem or "out of memory on another rank",
            )
            self._missing.clear()
            return
        assert graph is not None, size
        self._graphs[size] = graph
        if not self._missing:
            log.info(
                "graphs: decode steps of up to %d rows run as captured graphs (%d graphs)",
                self._sizes[-1],
                len(self._graphs),
            )

    def _try(self, size: int) -> tuple[GraphT | None, str]:
        """Return the graph of this size, or None and the reason. The error is dropped, so that it keeps no tensor alive."""
        try:
            return self._capture(size), ""
        except torch.OutOfMemoryError as error:
            return None, str(error).splitlines()[0]
