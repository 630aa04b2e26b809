"""Number of drafts of each request in a step, from measured step times and acceptance.

A step of ``n`` tokens takes about ``base + n * each`` seconds; both are fitted to recent steps of as many rows. The first draft
of a request is accepted with probability ``p``, the second with ``p ** 2`` and so on; ``p`` is the recent acceptance
rate of that request. Tokens that a grammar forces have a rate of their own. Drafts cost time too:

- each draft that is verified: ``each``;
- a draft model's k-th drafts of all requests, computed in its k-th step: its own ``base``, and ``each`` per row;
- a step in which drafts are asked for, and each of these requests: such as a search, whether it finds any or not;
- tokens of a request that the draft model has not computed yet: their time, over the typical number of steps of a request.

The numbers with the most expected tokens per second are used. For a given rate, a draft is worth its probability over the
rate, and each request's best number is known. The rate of these numbers is higher, and is used next, until it no longer
grows (Dinkelbach, 1967).

After `TRIAL_EVERY` steps, a request without drafts verifies one, to update its acceptance rate. The next trials are after more
and more steps, at most `MAX_TRIAL_EVERY`, until drafts pay. A new request starts with the
recent acceptance rate of all requests, which remains part of its estimate. Where no drafts pay, the next choice is some steps
later. All costs are paid from a `quintet.executor.speculation.budget.DraftBudget`. It limits trials, and the loss if estimates
are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quintet.executor.ragged import Int
from quintet.executor.speculation.budget import DraftBudget, Floats
from quintet.executor.speculation.step_time import StepTime, StepTimes

DRAFT_MEMORY = 0.97
"""Weight of the past at each new draft."""

PRIOR_SHARE, PRIOR_WEIGHT, MAX_SHARE = 0.6, 8.0, 0.99
"""Assumed acceptance of the first request; the number of drafts that the acceptance of all requests counts as in the estimate
of each; and the highest acceptance rate."""

OPTIMISM = 0.25
"""Part of the standard error of an acceptance rate that is added to it."""

SEARCH_MEMORY = 0.9
"""Weight of the past in the time of searches, and in the share that finds drafts."""

FORCED_SHARE = 0.95
"""Assumed acceptance of the tokens that a grammar forces, for a new request."""

TYPICAL_MEMORY = 0.99
"""Weight of the past in the acceptance of all requests, at each new draft."""

PRIOR_DRAFT_COST = 0.25
"""Assumed ratio of a draft model's step time to that of the served model, until steps of the draft model were measured."""

TRIAL_EVERY, MAX_TRIAL_EVERY, RECHECK_EVERY = 32, 128, 512
"""Steps after which a request without drafts tries one: at first, at most, and if ideal drafts would gain too little."""

MIN_IDEAL_GAIN = 0.1
"""Gain in tokens per second with drafts that are nearly always accepted, from which trials are worth their time."""

MIN_PAUSE, MAX_PAUSE = 4, 32
"""Steps between two choices if no drafts pay. The pause doubles from one to the next."""

REQUEST_STEPS, REQUEST_MEMORY = 64.0, 0.9
"""Assumed steps of a request, until some have ended; and the weight of the past at each end."""

MAX_ROUNDS = 6
"""Maximum rounds of the search for the best numbers. Three are usual."""


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Time of proposing drafts."""

    step_time: tuple[float, float] = (0.0, 0.0)
    """See `quintet.executor.speculation.drafters.Drafter.step_time`."""
    num_missing: Int | None = None
    """Tokens that the drafter computes before the first draft of each row, besides the newest. None: it computes none."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Chosen number of drafts of some rows."""

    slots: Int
    counts: Int
    missing_s: Floats
    """Expected time of the missing tokens of each row."""
    is_trial: NDArray[np.bool_]
    """Rows with one draft that is not expected to pay."""
    model_s: float
    """Expected time of a draft model's steps, missing tokens included."""
    is_first: bool
    """Some request has its first drafts; a search then indexes its tokens."""

    def of_rows(self, rows: NDArray[np.bool_]) -> DraftCounts:
        """Return the choice for these rows, all those with drafts among them."""
        columns = self.slots[rows], self.counts[rows], self.missing_s[rows], self.is_trial[rows]
        return DraftCounts(*columns, self.model_s, self.is_first)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured times of a step, and its drafts."""

    num_tokens: int
    """Computed tokens, drafts included; 0 if the step has prompts: their tokens take another time."""
    seconds: float
    """Time of the computation."""
    overhead_s: float
    """Time of choosing, proposing and accepting drafts."""
    num_drafts: int
    num_accepted: int
    num_steps: int = 1
    """Number of such steps; the times are means."""


class DraftLengths:
    """Acceptance of each slot's drafts, and the number of drafts with the highest throughput."""

    def __init__(self, num_slots: int) -> None:
        self.time, self._budget = StepTimes(), DraftBudget(num_slots)
        self._accepted = np.zeros((num_slots, 2))
        """Weighted sums by slot, of the drafter's and of forced drafts."""
        self._weights = np.zeros((num_slots, 2))
        self._num_verified = np.zeros(num_slots)
        """Drafts of the drafter by slot, of the current request."""
        self._found = np.ones(num_slots)
        """Recent share of the searches by slot that found drafts."""
        self._typical, self._request_steps = PRIOR_SHARE, REQUEST_STEPS
        self._num_steps, self._next_choice, self._pause = 0, 0, MIN_PAUSE
        self._began = np.zeros(num_slots, np.int64)
        """First step of the request, by slot."""
        self._last_draft = np.zeros(num_slots, np.int64)
        self._trial_every = TRIAL_EVERY
        """Of all slots, since trials at the same time share a draft model's steps."""
        self._asking = StepTime()
        """Time of asking for drafts by rows, besides that of a draft model's steps and of verification."""

    def begin(self, slot: int) -> None:
        """Forget the former request of a slot."""
        self._accepted[slot] = self._weights[slot] = self._num_verified[slot] = 0.0
        self._found[slot] = 1.0
        self._began[slot] = self._last_draft[slot] = self._next_choice = self._num_steps
        self._pause, self._trial_every = MIN_PAUSE, TRIAL_EVERY
        self._budget.begin(slot)

    def end(self, slot: int) -> None:
        """Note that the request of a slot ended."""
        num_steps = float(max(1, self._num_steps - self._began[slot]))
        self._request_steps += (1.0 - REQUEST_MEMORY) * (num_steps - self._request_steps)

    def note(self, slot: int, num_accepted: int, num_drafts: int, num_forced: int = 0) -> None:
        """Record a verification. Drafts after the first rejected one are not counted. num_forced: the first of the drafts."""
        for index in range(min(num_accepted + 1, num_drafts)):
            is_accepted, is_forced = index < num_accepted, index < num_forced
            at = slot, int(is_forced)
            self._accepted[at] = DRAFT_MEMORY * self._accepted[at] + is_accepted
            self._weights[at] = DRAFT_MEMORY * self._weights[at] + 1.0
            if not is_forced:
                self._typical += (1.0 - TYPICAL_MEMORY) * (is_accepted - self._typical)
                self._num_verified[slot] += 1.0

    def rates(self, slots: Int) -> Floats:
        """Return the estimated acceptance rate of these slots' drafts: ``[slots, 2]``, of the drafter's and of forced drafts."""
        accepted = self._accepted[slots] + PRIOR_WEIGHT * np.array((self._typical, FORCED_SHARE))
        return np.minimum(accepted / (self._weights[slots] + PRIOR_WEIGHT), MAX_SHARE)

    def _optimistic_rates(self, slots: Int) -> Floats:
        """Return the rates, those of a drafter's drafts higher by a part of the estimate's standard error.

        A request of unknown acceptance then tries drafts that may pay (Lai & Robbins, 1985).
        """
        rates = self.rates(slots)
        own = rates[:, 0]
        error = np.sqrt(own * (1.0 - own) / (PRIOR_WEIGHT + self._num_verified[slots]))
        rates[:, 0] = np.minimum(own + OPTIMISM * error, MAX_SHARE)
        return rates

    def note_found(self, slots: Int, has_drafts: NDArray[np.bool_]) -> None:
        """Record for which of these slots the drafter found drafts."""
        self._found[slots] += (1.0 - SEARCH_MEMORY) * (has_drafts - self._found[slots])

    def note_step(self, slots: Int, num_draws: int, step: StepCost, asked: DraftCounts | None = None) -> None:
        """Record the time of a step of these slots. asked: its rows that were asked for drafts."""
        if step.num_tokens:
            self.time.note(num_draws, step.num_tokens, step.seconds)
        base, each = self.time.fit(num_draws)
        if not num_draws or not base + each:
            return
        plain_s, cost_s = base + each * num_draws, step.overhead_s + each * step.num_drafts
        if asked is not None:
            # Indexing a text takes longer than a search, and the time of missing tokens is an estimate.
            if not asked.is_first and asked.missing_s.sum() <= step.overhead_s / 2:
                self._asking.note(len(asked.slots), max(0.0, step.overhead_s - asked.model_s))
            invested_s = np.where(asked.is_trial, 0.0, asked.missing_s)
            total_s = float(invested_s.sum())
            if total_s:
                invested_s *= min(1.0, step.overhead_s / total_s)
                self._budget.invest(asked.slots, invested_s)
                cost_s -= float(invested_s.sum())
        saved_s = step.num_accepted * plain_s / num_draws
        seconds = step.num_steps * (step.seconds + step.overhead_s)
        self._budget.note_step(slots, plain_s, seconds, saved_s, cost_s)

    def is_due(self, *, has_forced: bool = False) -> bool:
        """Return whether to choose drafts in the next step. has_forced: a grammar may force tokens."""
        return self._budget.is_open and (has_forced or self._num_steps >= self._next_choice)

    def begin_step(self) -> None:
        """Count a step, before `choose`."""
        self._num_steps += 1

    def choose(
        self,
        slots: Int,
        most: Int,
        num_draws: int,
        costs: DraftCosts,
        num_forced: Int | None = None,
    ) -> DraftCounts:
        """Return the number of drafts to propose for each of these slots, at most ``most``.

        num_draws: tokens that the step draws without drafts. num_forced: forced tokens of each slot, which are proposed
        first.
        """
        base, each = self.time.fit(num_draws)
        draft_base, draft_each = costs.step_time
        if costs.num_missing is not None and not draft_base + draft_each:
            draft_base, draft_each = PRIOR_DRAFT_COST * (base + each), PRIOR_DRAFT_COST * each
        num_missing: Floats = np.zeros(len(slots))
        if costs.num_missing is not None:
            num_missing = costs.num_missing.astype(np.float64)
        missing_s: Floats = draft_each * num_missing
        rates = self._optimistic_rates(slots)
        found = self._found[slots]
        if num_forced is not None:
            found = np.where(num_forced > 0, 1.0, found)
        asking_s, row_s = self._asking.fit()
        problem = _Drafts(
            *(found, row_s + missing_s / self._request_steps, each + draft_each, draft_base),
            *(asking_s, num_draws, base + each * num_draws),
        )
        counts, _ = problem.best_counts(_expected(rates, most, num_forced))
        waited = np.where(counts > 0, 0, self._num_steps - self._last_draft[slots])
        if (waited >= self._trial_every).any():
            rates[:, 0] = MAX_SHARE
            ideal, gain = problem.best_counts(_expected(rates, most, num_forced))
            is_possible = (ideal > 0) & (gain >= MIN_IDEAL_GAIN)
            tries = (most > 0) & (waited >= np.where(is_possible, self._trial_every, RECHECK_EVERY))
            self._limit_trials(tries, asking_s + row_s + each + draft_each + draft_base + missing_s)
        else:
            tries = waited < 0
        self._next_choice = self._num_steps
        if counts.any():
            self._pause, self._trial_every = MIN_PAUSE, TRIAL_EVERY
        else:
            self._next_choice += self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        counts[tries] = 1
        if tries.any():
            self._trial_every = min(self._trial_every + TRIAL_EVERY // 2, MAX_TRIAL_EVERY)
        asked = counts > 0
        is_first = bool((self._last_draft[slots[asked]] == self._began[slots[asked]]).any())
        self._last_draft[slots[asked]] = self._num_steps
        model_s = draft_base * int(counts.max(initial=0)) + float(
            draft_each * counts.sum() + missing_s[asked].sum()
        )
        return DraftCounts(slots, counts, missing_s, tries, model_s, is_first)

    def _limit_trials(self, tries: NDArray[np.bool_], seconds: Floats) -> None:
        """Remove the trials that the budget does not cover; prefer cheap ones."""
        rows = np.flatnonzero(tries)
        rows = rows[np.argsort(seconds[rows], kind="stable")]
        tries[rows[~self._budget.can_pay(np.cumsum(seconds[rows]))]] = False


def _expected(rates: Floats, most: Int, num_forced: Int | None) -> Floats:
    """Return the probability that each draft is accepted: ``[rows, drafts]``. rates: of a drafter's, and of forced drafts."""
    numbers = np.arange(1, int(most.max(initial=0)) + 1)
    if num_forced is None:
        expected: Floats = rates[:, :1] ** numbers
    else:
        of_forced = np.minimum(numbers, num_forced[:, None])
        expected = rates[:, :1] ** (numbers - of_forced) * rates[:, 1:] ** of_forced
    expected[numbers > most[:, None]] = 0.0
    return expected


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Times of a step, and of the drafts that it may verify."""

    found: Floats
    """Probability by row that the drafter finds drafts."""
    row_s: Floats
    """Time by row of asking for drafts."""
    each_s: float
    """Time of each draft."""
    depth_s: float
    """Time of the k-th drafts of all rows."""
    asking_s: float
    """Time of asking for any drafts."""
    num_draws: int
    """Tokens without drafts."""
    plain_s: float
    """Time without drafts."""

    def best_counts(self, expected: Floats) -> tuple[Int, float]:
        """Return the number of drafts of each row with the most tokens per second, and their gain as a share of it.

        expected: see `_expected`.
        """
        counts = np.zeros(len(expected), np.int64)
        if not expected.size or not self.plain_s:
            return counts, 0.0
        numbers = np.arange(1, expected.shape[1] + 1)
        found, rate = self.found[:, None], self.num_draws / self.plain_s
        for _ in range(MAX_ROUNDS):
            is_worthwhile = expected > rate * self.each_s
            gains = found * np.cumsum(np.where(is_worthwhile, expected - rate * self.each_s, 0.0), axis=1)
            gains -= rate * self.row_s[:, None]
            of_depth = np.maximum(gains, 0.0).sum(axis=0) - rate * (self.asking_s + self.depth_s * numbers)
            best = int(of_depth.argmax())
            chosen = is_worthwhile[:, : best + 1] & (gains[:, best : best + 1] > 0.0)
            tokens = self.num_draws + float((found * expected[:, : best + 1])[chosen].sum())
            found_counts = chosen.sum(axis=1)
            seconds = self.plain_s + self.asking_s + self.depth_s * int(found_counts.max())
            seconds += float(
                (self.each_s * self.found * found_counts + self.row_s * (found_counts > 0)).sum()
            )
            if tokens <= rate * seconds * (1.0 + 1e-9):
                break
            counts, rate = found_counts, tokens / seconds
        return counts, rate * self.plain_s / self.num_draws - 1.0
