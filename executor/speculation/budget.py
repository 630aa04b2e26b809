"""Time that drafts may lose.

The account receives `LOSS_SHARE` of the time of each step, and the time that accepted drafts save. It pays for proposing and for
verifying drafts. Once it is empty, no drafts are proposed until it has some credit again. So drafts that do not pay lose
about that share of the time, even if the estimates of their cost and acceptance are wrong.

A draft model computes the missing tokens of a request once, and its drafts then pay over many steps. Such an investment is
therefore paid in parts over the steps of the request, and the rest at its end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int

Floats = NDArray[np.float64]

LOSS_SHARE = 0.01
"""Share of all time that drafts may lose."""

MAX_CREDIT_STEPS = 16
"""Credit at start, and the highest credit, in times of a step without drafts."""

MIN_CREDIT_SHARE = 1 / 4
"""Credit from which drafts are proposed again, as a share of the highest credit."""

PART_SHARE = 1 / 64
"""Part of an investment that is paid in each step."""


class DraftBudget:
    """Account of the time that drafts cost and save, in seconds."""

    def __init__(self, num_slots: int) -> None:
        self.is_open = True
        """False after a debt, until there is some credit."""
        self._credit_s, self._limit_s = 0.0, 0.0
        """The limit is 0 before the first step."""
        self._invested_s = np.zeros(num_slots)
        """Investments in the requests of the slots, as far as they are not paid."""
        self._is_used = False
        """There were investments."""

    def can_pay(self, seconds: Floats) -> NDArray[np.bool_]:
        """Return which of these costs the credit covers. A full account covers all."""
        return seconds <= (self._credit_s if self._credit_s < self._limit_s else np.inf)

    def begin(self, slot: int) -> None:
        """Begin a request in a slot, and pay the rest of the last one's investment."""
        self._credit_s -= float(self._invested_s[slot])
        self._invested_s[slot] = 0.0

    def invest(self, slots: Int, seconds: Floats) -> None:
        """Note an investment in the requests of these slots."""
        self._invested_s[slots] += seconds
        self._is_used = True

    def note_step(self, slots: Int, plain_s: float, seconds: float, saved_s: float, cost_s: float) -> None:
        """Note a step of these slots.

        plain_s: of such a step without drafts. seconds: of this one. saved_s: by accepted drafts. cost_s: of drafts, without
        investments.
        """
        if self._is_used:
            parts = PART_SHARE * self._invested_s[slots]
            self._invested_s[slots] -= parts
            cost_s += float(parts.sum())
        if not self._limit_s:
            self._credit_s += MAX_CREDIT_STEPS * plain_s
        self._limit_s = MAX_CREDIT_STEPS * plain_s
        self._credit_s = min(self._credit_s + LOSS_SHARE * seconds + saved_s - cost_s, self._limit_s)
        if self._credit_s <= 0.0:
            self.is_open = False
        elif self._credit_s >= MIN_CREDIT_SHARE * self._limit_s:
            self.is_open = True
