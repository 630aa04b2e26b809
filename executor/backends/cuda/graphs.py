"""Captured graphs of decode steps: padded sizes and capture order.

Steps with drafts have graphs of their own, in which a row has several tokens and draws after each.

The server is ready before any graph: steps run eagerly until the graph of their size exists. Graphs are captured one at a time
between steps, largest first, so that smaller ones reuse the pool memory of the largest. All ranks of a model keep the same
graphs. Owns no tensor.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from quintet.wire.config import SchedulerConfig

GraphT = TypeVar("GraphT")

log = logging.getLogger("quintet")

FINE = 8
"""Graph sizes are multiples of this up to `COARSE_FROM`, then of `COARSE`. From 64 rows, padding adds at most one eighth."""
COARSE_FROM = 256
COARSE = 32

MAX_DRAFTED_TOKENS = 256
"""Tokens of the largest graph with drafts. The kernels of larger steps take long compared with their launches."""


class GraphSize(NamedTuple):
    """Padded size of a decode step, in which every token is followed by a draw."""

    num_tokens: int
    max_count: int
    """Maximum tokens of a row: 1 without drafts."""


def padded_sizes(most: int) -> list[int]:
    """Return the graph sizes in tokens, ascending; the last is ``most``."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = FINE
    while size < most:
        sizes.append(size)
        size += FINE if size < COARSE_FROM else COARSE
    return [*sizes, most]


def graph_sizes(scheduler: SchedulerConfig, max_draws: int) -> list[GraphSize]:
    """Return the sizes of all graphs, ascending in tokens. max_draws: of a step."""
    max_num_seqs, speculative = scheduler.max_num_seqs, scheduler.speculative
    sizes = [GraphSize(size, 1) for size in padded_sizes(max_num_seqs)]
    if speculative is not None:
        max_count = 1 + speculative.num_speculative_tokens
        most = min(max_draws, MAX_DRAFTED_TOKENS, max_num_seqs * max_count)
        sizes += [GraphSize(size, max_count) for size in padded_sizes(most) if size > 1]
    return sorted(sizes, key=lambda size: (size.num_tokens, -size.max_count))


class DecodeGraphs(Generic[GraphT]):
    """Captured graphs by padded size."""

    def __init__(
        self,
        sizes: list[GraphSize],
        capture: Callable[[GraphSize], GraphT],
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """sizes: of `graph_sizes`. capture: returns the graph of a size; may raise `torch.OutOfMemoryError`.

        agree: with several ranks, called after each capture with this rank's success; returns whether all ranks succeeded.
        """
        self._counts = sorted({size.max_count for size in sizes})
        self._sizes = {
            count: [size.num_tokens for size in sizes if size.max_count == count] for count in self._counts
        }
        """Ascending, by `GraphSize.max_count`."""
        self._missing = list(sizes)
        self._graphs: dict[GraphSize, GraphT] = {}
        self._capture = capture
        self._agree = agree

    @property
    def num_missing(self) -> int:
        """Number of graphs left to capture."""
        return len(self._missing)

    def find(self, size: GraphSize) -> GraphT | None:
        """Return the captured graph for a step of this size before padding, or None.

        If the best size is missing, the next one is used. Padding beyond that costs more than an eager step.
        """
        count = self._padded_count(size)
        sizes = self._sizes.get(count, [])
        first = bisect.bisect_left(sizes, size.num_tokens)
        for num_tokens in sizes[first : first + 2]:
            graph = self._graphs.get(GraphSize(num_tokens, count))
            if graph is not None:
                return graph
        return None

    def has_size(self, size: GraphSize) -> bool:
        """Return whether a graph for steps of this size exists or will be captured."""
        sizes = self._sizes.get(self._padded_count(size))
        return sizes is not None and size.num_tokens <= sizes[-1]

    def _padded_count(self, size: GraphSize) -> int:
        """Return the `GraphSize.max_count` of graphs for such steps; 0 if there are none."""
        return next((count for count in self._counts if count >= size.max_count), 0)

    def of_size(self, size: GraphSize) -> GraphT | None:
        """Return the graph of exactly this padded size, or None."""
        return self._graphs.get(size)

    def capture_one(self) -> None:
        """Capture the largest missing graph. If it does not fit in memory, no further graph is captured."""
        size = self._missing.pop()
        graph, problem = self._try(size)
        is_captured = graph is not None
        if not (is_captured if self._agree is None else self._agree(is_captured)):
            log.warning(
                "graphs: steps of %s tokens run eagerly, because a graph could not be captured: %s;"
                " lower --gpu-memory-utilization to leave memory for graphs",
                ", ".join(map(str, sorted({each.num_tokens for each in [*self._missing, size]}))),
                problem or "out of memory on another rank",
            )
            self._missing.clear()
            return
        assert graph is not None, size
        self._graphs[size] = graph
        if not self._missing:
            log.info(
                "graphs: decode steps of up to %d rows run as captured graphs (%d graphs)",
                self._sizes[1][-1],
                len(self._graphs),
            )

    def _try(self, size: GraphSize) -> tuple[GraphT | None, str]:
        """Return the graph of this size, or None and the reason. The error is dropped, so that it keeps no tensor alive."""
        try:
            return self._capture(size), ""
        except torch.OutOfMemoryError as error:
            return None, str(error).splitlines()[0]
