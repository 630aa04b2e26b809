"""Number of drafts of each request in a step, from measured step times and acceptance.

A step of ``n`` tokens takes about ``base + n * each`` seconds; both are fitted to recent steps. The first draft of a
request is accepted with probability ``p``, the second with ``p ** 2`` and so on; ``p`` is the recent acceptance
rate of that request. Tokens that a grammar forces have a rate of their own. A draft is worth its time while its
probability, over ``each`` seconds, exceeds the tokens per second of the step without it. Drafts are taken in order of
their probability, over all requests.

A draft model computes the k-th drafts of all requests in its k-th step, which has a base time too. So the choice is made
for each maximum length, and the one with the most tokens per second is used.

Every `TRIAL_EVERY` steps, a request without drafts verifies one, to update its acceptance rate. Trials take at most
`TRIAL_SHARE` of the time. A new request starts with the recent acceptance rate of all requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP_MEMORY, DRAFT_MEMORY = 0.98, 0.9
"""Weight of the past at each new step, and at each new draft."""

PRIOR_SHARE, PRIOR_WEIGHT = 0.6, 2.0
"""Assumed acceptance of the first request, and the number of drafts that the acceptance of a new request counts as."""

FORCED_SHARE = 0.95
"""Assumed acceptance of the tokens that a grammar forces, for a new request."""

TYPICAL_MEMORY = 0.99
"""Weight of the past in the acceptance of all requests, at each new draft."""

PRIOR_COST = 0.2
"""Assumed ratio of ``each`` to the time of a step of one token, until steps of different sizes were measured."""

TRIAL_EVERY = 32
"""Steps after which a request without drafts tries one."""

TRIAL_SHARE, TRIAL_MEMORY = 0.01, 0.999
"""Maximum share of trials in the time of recent steps, and the weight of the past at each new step."""


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
        self._accepted = np.zeros((num_slots, 2))
        """Weighted sums by slot, of the drafter's and of forced drafts."""
        self._weights = np.zeros((num_slots, 2))
        self._num_waited = np.zeros(num_slots, np.int64)
        self._typical = PRIOR_SHARE
        self._is_trial = False
        """The last choice has trials only."""
        self._step_s, self._trial_s = 0.0, 0.0
        """Weighted sums of the seconds of steps, and of proposing drafts for trials."""

    def begin(self, slot: int) -> None:
        """Forget the former request of a slot."""
        self._accepted[slot] = self._typical * PRIOR_WEIGHT, FORCED_SHARE * PRIOR_WEIGHT
        self._weights[slot] = PRIOR_WEIGHT
        self._num_waited[slot] = 0

    def note(self, slot: int, num_accepted: int, num_drafts: int, num_forced: int = 0) -> None:
        """Record a verification. Drafts after the first rejected one are not counted. num_forced: the first of the drafts."""
        for index in range(min(num_accepted + 1, num_drafts)):
            is_accepted, is_forced = index < num_accepted, index < num_forced
            at = slot, int(is_forced)
            self._accepted[at] = DRAFT_MEMORY * self._accepted[at] + is_accepted
            self._weights[at] = DRAFT_MEMORY * self._weights[at] + 1.0
            if not is_forced:
                self._typical += (1.0 - TYPICAL_MEMORY) * (is_accepted - self._typical)

    def note_step(self, seconds: float, proposing_s: float) -> None:
        """Record the time of a step, of which ``proposing_s`` was spent on proposing drafts."""
        self._step_s = TRIAL_MEMORY * self._step_s + seconds
        self._trial_s = TRIAL_MEMORY * self._trial_s + (proposing_s if self._is_trial else 0.0)

    def choose(
        self,
        slots: NDArray[np.int32],
        most: NDArray[np.int64],
        num_tokens: int,
        num_draws: int,
        draft_time: tuple[float, float] = (0.0, 0.0),
        num_forced: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Return the number of drafts to propose for each of these slots, at most ``most``.

        num_tokens, num_draws: tokens that the step computes and draws without drafts. draft_time: see
        `quintet.executor.speculation.drafters.Drafter.step_time`. num_forced: forced tokens of each slot, which are
        proposed first.
        """
        rates, forced_rates = np.minimum(self._accepted[slots] / self._weights[slots], 0.99).T
        longest = int(most.max(initial=0))
        numbers = np.arange(1, longest + 1)
        of_forced = np.minimum(numbers, 0 if num_forced is None else num_forced[:, None])
        expected_tokens: NDArray[np.float64] = rates[:, None] ** (numbers - of_forced)
        expected_tokens = expected_tokens * forced_rates[:, None] ** of_forced
        expected_tokens[numbers > most[:, None]] = 0.0
        base, each = self.time.fit()
        draft_base, draft_each = draft_time
        counts, best_rate = np.zeros(len(slots), np.int64), 0.0
        if draft_base and base + each:
            best_rate = num_draws / (base + each * num_tokens)
        for depth in range(1, longest + 1) if draft_base else (longest,):
            seconds = base + each * num_tokens + draft_base * depth
            found, rate = _most_tokens(expected_tokens[:, :depth], seconds, each + draft_each, num_draws)
            if rate <= best_rate:
                break  # a longer draft costs as much, and is accepted less often
            counts, best_rate = found, rate
        self._num_waited[slots] = np.where(counts > 0, 0, self._num_waited[slots] + 1)
        tries = (self._num_waited[slots] >= TRIAL_EVERY) & (most > 0)
        tries &= self._trial_s <= TRIAL_SHARE * self._step_s
        self._num_waited[slots[tries]] = 0
        self._is_trial = bool(tries.any()) and not counts.any()
        return np.where(tries, 1, counts)


def _most_tokens(
    expected_tokens: NDArray[np.float64], seconds: float, each: float, num_draws: int
) -> tuple[NDArray[np.int64], float]:
    """Return the number of drafts of each request with the most tokens per second, and that rate.

    expected_tokens: ``[requests, drafts]``, acceptance probabilities. seconds: of the step without drafts. each: seconds
    of a draft.
    """
    ordered = np.sort(expected_tokens, axis=None)[::-1]
    before = np.arange(len(ordered))
    tokens_before = num_draws + np.concatenate(([0.0], np.cumsum(ordered)[:-1]))
    is_worthwhile = ordered * (seconds + each * before) > tokens_before * each
    num_chosen = int(np.argmin(is_worthwhile)) if not is_worthwhile.all() else len(is_worthwhile)
    if not num_chosen:
        return np.zeros(len(expected_tokens), np.int64), 0.0
    counts = (expected_tokens >= ordered[num_chosen - 1]).sum(axis=1)
    return counts, (num_draws + float(ordered[:num_chosen].sum())) / (seconds + each * num_chosen)
