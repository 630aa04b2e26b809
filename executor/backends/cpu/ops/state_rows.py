"""Rows of a step with their recurrent states; shared by the operations with state.

A layer's states are one tensor per kind, ``[num_blocks, ...]``, indexed by blocks of the state group. A row reads one block and
writes one, the same or another. Operations process one token of all rows at a time. With one token per row there is no loop
and no host read of an index, so a CUDA graph can capture them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows of consecutive tokens of a step, on one device."""

    sources: torch.Tensor
    """int64[R]: block to load the state from."""
    targets: torch.Tensor
    """int64[R]: block to save the state after the row's last token; distinct for all rows."""
    fresh: torch.Tensor
    """bool[R]: whether the row starts a request, with a zero state regardless of the source block."""
    offsets: torch.Tensor
    """int64[R]: index of the row's first token in the step."""
    counts: torch.Tensor
    """int64[R]: number of tokens of the row."""
    max_count: int
    """Largest of the counts."""

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """Return a copy of each row's state ``[R, ...]``."""
        fresh = self.fresh.view(-1, *(1 for _ in states.shape[1:]))
        return states[self.sources].masked_fill_(fresh, 0)

    def save(self, states: torch.Tensor, after: torch.Tensor) -> None:
        """Write each row's state ``after [R, ...]``."""
        states[self.targets] = after

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each token position within the rows, the token indices ``int64[R]`` and the active rows ``bool[R]``."""
        for i in range(self.max_count):
            active = self.counts > i
            yield torch.where(active, self.offsets + i, 0), active


class Scanned:
    """Result of a scan, filled token by token; shaped like one of its inputs."""

    def __init__(self, like: torch.Tensor) -> None:
        # Inactive rows write to the extra last line, which is dropped.
        self._lines = like.new_zeros((len(like) + 1, like.shape[1]))

    def put(self, tokens: torch.Tensor, active: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values [R, ...]`` of the active rows to the lines of ``tokens [R]``, cast to the lines' dtype."""
        lines = torch.where(active, tokens, len(self._lines) - 1)
        self._lines[lines] = values.reshape(len(values), -1).to(self._lines.dtype)

    @property
    def lines(self) -> torch.Tensor:
        """``[num_tokens, width]``."""
        return self._lines[:-1]


def keep_where(active: torch.Tensor, after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the states ``after [R, ...]`` of active rows and ``before`` of the others."""
    return torch.where(active.view(-1, *(1 for _ in after.shape[1:])), after, before)
