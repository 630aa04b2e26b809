"""Which state each row of a step goes on from and where it leaves its own: what the operations with a state share.

A layer's states are one tensor per kind, ``[num_blocks, ...]``, a block of the state group each. A row reads one block and
writes one, the same or another. Operations go from token to token, all rows at once: with rows of one token there is no
loop and no index is read by the host, so that a device can capture them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows of consecutive tokens among a step's, on one device."""

    sources: torch.Tensor
    """int64[R]: the block whose states a row goes on from."""
    targets: torch.Tensor
    """int64[R]: the block that gets the states behind its last token. No two rows have one in common."""
    fresh: torch.Tensor
    """bool[R]: whether the row begins a request: its states are zeros, whatever the source holds."""
    offsets: torch.Tensor
    """int64[R]: its first token's index among the step's."""
    counts: torch.Tensor
    """int64[R]: its tokens."""
    max_count: int
    """The most tokens of a row."""

    def load(self, states: torch.Tensor) -> torch.Tensor:
        """Return each row's state ``[R, ...]``, a copy."""
        fresh = self.fresh.view(-1, *(1 for _ in states.shape[1:]))
        return states[self.sources].masked_fill_(fresh, 0)

    def save(self, states: torch.Tensor, after: torch.Tensor) -> None:
        """Write each row's state ``after [R, ...]``."""
        states[self.targets] = after

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for the first, second, ... token of every row: its index ``int64[R]``, and whether there is one, ``bool[R]``."""
        for i in range(self.max_count):
            there = self.counts > i
            yield torch.where(there, self.offsets + i, 0), there


class Scanned:
    """The result of a scan, shaped like one of its values, filled token by token."""

    def __init__(self, like: torch.Tensor) -> None:
        # What rows without a further token compute goes to the last line, which nobody gets.
        self._lines = like.new_zeros((len(like) + 1, like.shape[1]))

    def put(self, tokens: torch.Tensor, there: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the lines of ``tokens [R]`` that are there with ``values [R, ...]``, in the lines' number format."""
        lines = torch.where(there, tokens, len(self._lines) - 1)
        self._lines[lines] = values.reshape(len(values), -1).to(self._lines.dtype)

    @property
    def lines(self) -> torch.Tensor:
        """``[num_tokens, width]``."""
        return self._lines[:-1]


def keep_where(there: torch.Tensor, after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the states ``after [R, ...]`` of the rows that had a token, and ``before`` of the others."""
    return torch.where(there.view(-1, *(1 for _ in after.shape[1:])), after, before)
