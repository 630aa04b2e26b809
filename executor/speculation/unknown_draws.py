"""Draws of steps in flight, by slot: their tokens are unknown, and with drafts also their number.

A worker that begins a step before the one before it has ended needs them: the newest position of a request is that of the
last known token plus its draws in flight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int

Slots = NDArray[np.integer]


class UnknownDraws:
    """Number of draws in flight of each slot."""

    def __init__(self, num_slots: int) -> None:
        self._counts: Int = np.zeros(num_slots, np.int64)
        """Draws in flight; a row with drafts counts as one."""
        self._has_drafts: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Drafts of the slot are in flight."""
        self._uses: Int = np.zeros(num_slots, np.int64)
        """Requests that the slot has had."""

    def reset(self) -> None:
        """Forget all draws: the results of the steps in flight are dropped."""
        self._counts[:] = 0
        self._has_drafts[:] = False
        self._uses += 1

    def new_request(self, slot: int) -> None:
        """Forget the draws of the slot's last request: nothing needs their tokens."""
        self._counts[slot] = 0
        self._has_drafts[slot] = False
        self._uses[slot] += 1

    def uses(self, slots: Slots) -> Int:
        """Return numbers that identify the requests of these slots."""
        return self._uses[slots]

    def is_current(self, slots: Slots, uses: Int) -> NDArray[np.bool_]:
        """Return which of these slots still have the request that they had."""
        is_current: NDArray[np.bool_] = self._uses[slots] == uses
        return is_current

    def add(self, slots: Slots, num_draws: int = 1) -> None:
        """Note that a step with draws of these slots began."""
        self._counts[slots] += num_draws

    def add_drafts(self, slots: Slots) -> None:
        """Note that a step verifies drafts of these slots."""
        self._has_drafts[slots] = True

    def remove(self, slots: Slots) -> None:
        """Note that a step with a draw of these slots ended."""
        self._counts[slots] -= 1
        self._has_drafts[slots] = False

    def of(self, slots: Slots) -> Int:
        """Return the number of draws in flight of these slots."""
        return self._counts[slots]

    def have_drafts(self, slots: Slots) -> bool:
        """Return whether the number of new tokens of one of these slots is unknown."""
        return bool(self._has_drafts[slots].any())
