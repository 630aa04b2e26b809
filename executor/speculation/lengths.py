"""Number of drafts of each request in a step, from measured step times and acceptance.

A step of ``n`` tokens takes about ``base + n * each`` seconds; both are fitted to recent steps. The first draft of a
request is accepted with probability ``p``, the second with ``p ** 2`` and so on; ``p`` is the recent acceptance
rate of that request. A draft is worth its time while its probability, over ``each`` seconds, exceeds the tokens per
second of the step without it. Drafts are taken in order of their probability, over all requests.

Every `TRIAL_EVERY` steps, a request without drafts verifies one, to update its acceptance rate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_MEMORY, DRAFT_MEMORY = 0.98, 0.9
"""Weight of the past at each new step, and at each new draft."""

PRIOR_SHARE, PRIOR_WEIGHT = 0.6, 2.0
"""Assumed acceptance of a new request, and the number of drafts that it counts as."""

PRIOR_COST = 0.2
"""Assumed ratio of ``each`` to the time of a step of one token, until steps of different sizes were measured."""

TRIAL_EVERY = 32
"""Steps after which a request without drafts tries one."""


class StepTime:
    """Linear fit of the time of a step to its number of tokens, with exponential forgetting."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        """Weighted sums of 1, tokens, seconds, tokens squared, and tokens times seconds."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement."""
        x, y = float(num_tokens), seconds
        self._sums = STEP_MEMORY * self._sums + (1.0, x, y, x * x, x * y)

    def fit(self) -> tuple[float, float]:
        """Return ``base`` and ``each`` in seconds; (0, 0) before the first measurement."""
        weight, x, y, xx, xy = self._sums.tolist()
        if not weight:
            return 0.0, 0.0
        mean_x, mean_y = x / weight, y / weight
        spread = xx / weight - mean_x * mean_x
        each = PRIOR_COST * mean_y / (1.0 + PRIOR_COST * (mean_x - 1.0))
        if spread > 0.01 * mean_x * mean_x:
            each = (xy / weight - mean_x * mean_y) / spread
        each = min(max(each, 0.01 * mean_y / mean_x), mean_y / mean_x)
        return mean_y - each * mean_x, each


class DraftLengths:
    """Acceptance of each slot's drafts, and the number of drafts with the highest throughput."""

    def __init__(self, num_slots: int) -> None:
        self.time = StepTime()
        self._accepted = np.zeros(num_slots)
        self._weights = np.zeros(num_slots)
        self._num_waited = np.zeros(num_slots, np.int64)

    def begin(self, slot: int) -> None:
        """Forget the former request of a slot."""
        self._accepted[slot], self._weights[slot] = PRIOR_SHARE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._num_waited[slot] = 0

    def note(self, slot: int, num_accepted: int, num_drafts: int) -> None:
        """Record a verification. Drafts after the first rejected one are not counted."""
        for index in range(min(num_accepted + 1, num_drafts)):
            self._accepted[slot] = DRAFT_MEMORY * self._accepted[slot] + (index < num_accepted)
            self._weights[slot] = DRAFT_MEMORY * self._weights[slot] + 1.0

    def choose(
        self, slots: NDArray[np.int32], most: NDArray[np.int64], num_tokens: int, num_draws: int
    ) -> NDArray[np.int64]:
        """Return the number of drafts to propose for each of these slots, at most ``most``.

        num_tokens, num_draws: tokens that the step computes and draws without drafts.
        """
        rates = np.minimum(self._accepted[slots] / self._weights[slots], 0.99)
        base, each = self.time.fit()
        longest = int(most.max(initial=0))
        expected_tokens = rates[:, None] ** np.arange(1, longest + 1)
        expected_tokens[np.arange(1, longest + 1) > most[:, None]] = 0.0
        sorted_expected = np.sort(expected_tokens, axis=None)[::-1]
        before = np.arange(len(sorted_expected))
        seconds = base + each * (num_tokens + before)
        before_each = num_draws + np.concatenate(([0.0], np.cumsum(sorted_expected)[:-1]))
        is_worthwhile = sorted_expected * seconds > before_each * each
        num_chosen = int(np.argmin(is_worthwhile)) if not is_worthwhile.all() else len(is_worthwhile)
        if not num_chosen:
            counts = np.zeros(len(slots), np.int64)
        else:
            counts = (expected_tokens >= sorted_expected[num_chosen - 1]).sum(axis=1)
        self._num_waited[slots] = np.where(counts > 0, 0, self._num_waited[slots] + 1)
        tries = (self._num_waited[slots] >= TRIAL_EVERY) & (most > 0)
        self._num_waited[slots[tries]] = 0
        return np.where(tries, 1, counts)
