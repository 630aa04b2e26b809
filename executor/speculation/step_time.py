"""Time of a step by its number of tokens, fitted to recent steps."""

from __future__ import annotations

STEP_MEMORY, SLOPE_MEMORY = 0.98, 0.995
"""Weight of the past at each new step: in the mean time, and in the time per token."""

PRIOR_COST = 0.2
"""Assumed ratio of the time per token to that of a step of one token, until steps of different sizes were measured."""

MIN_VARIANCE = 0.002
"""Variance of the number of tokens, over its squared mean, from which the time per token is measured."""


MAX_EXCESS, MIN_STEPS = 1.5, 2
"""A longer step counts as this many times the expected time: it may have waited for a processor. Not in the first steps."""


class StepTime:
    """Linear fit, with exponential forgetting.

    A step with more tokens than any before is not counted: it touches memory for the first time, and takes longer.
    """

    __slots__ = ("_covariance", "_most_tokens", "_num_steps", "_recent", "_slow", "_variance")

    def __init__(self) -> None:
        self._most_tokens, self._num_steps = 0, 0
        self._recent, self._slow = (0.0, 0.0), (0.0, 0.0)
        """Mean tokens and seconds of recent steps, and of more steps."""
        self._variance, self._covariance = 0.0, 0.0
        """Of the tokens, and of tokens and seconds, over those more steps."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement."""
        if num_tokens > self._most_tokens:
            self._most_tokens = num_tokens
            return
        if self._num_steps >= MIN_STEPS:
            base, each = self.fit()
            seconds = min(seconds, MAX_EXCESS * (base + each * num_tokens))
        self._num_steps += 1
        part = max(1.0 - STEP_MEMORY, 1.0 / self._num_steps)
        x, y = self._recent
        self._recent = x + part * (num_tokens - x), y + part * (seconds - y)
        part = max(1.0 - SLOPE_MEMORY, 1.0 / self._num_steps)
        x, y = self._slow
        more_x, more_y = num_tokens - x, seconds - y
        self._slow = x + part * more_x, y + part * more_y
        self._variance = (1.0 - part) * (self._variance + part * more_x * more_x)
        self._covariance = (1.0 - part) * (self._covariance + part * more_x * more_y)

    def fit(self, prior_each: float | None = None) -> tuple[float, float]:
        """Return the seconds of a step without tokens, and of a token; (0, 0) before the first counted measurement.

        prior_each: of a token, until steps of different sizes were measured.
        """
        if not self._num_steps:
            return 0.0, 0.0
        mean_x, mean_y = self._recent
        each = prior_each
        if self._variance > MIN_VARIANCE * self._slow[0] ** 2:
            each = self._covariance / self._variance
        elif each is None:
            each = PRIOR_COST * mean_y / (1.0 + PRIOR_COST * (mean_x - 1.0))
        each = min(max(each, 0.01 * mean_y / mean_x), mean_y / mean_x)
        return mean_y - each * mean_x, each


class StepTimes:
    """Fits for different numbers of rows.

    On a CPU, a further token of a small step costs little, as weights are read anyway. It costs more in a large step. So the
    time of a draft is that of steps with about as many rows: up to the same power of two.
    """

    def __init__(self) -> None:
        self._of_all = StepTime()
        self._by_size: dict[int, StepTime] = {}

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Add a measurement of a step of ``num_rows`` rows. num_tokens: drafts included."""
        self._of_all.note(num_tokens, seconds)
        self._by_size.setdefault(_size(num_rows), StepTime()).note(num_tokens, seconds)

    def fit(self, num_rows: int) -> tuple[float, float]:
        """Return `StepTime.fit` for steps of this number of rows, drafts not counted."""
        of_all = self._of_all.fit()
        near = self._by_size.get(_size(num_rows))
        found = (0.0, 0.0) if near is None else near.fit(of_all[1])
        return found if any(found) else of_all


def _size(num_rows: int) -> int:
    return (num_rows - 1).bit_length()
