"""Relative speed of each engine, from the tokens queued before a request and its time to first token.

A linear fit over all engines gives the expected time for a number of tokens. An engine's slowness is the measured over
the expected time of its requests. Engines report nothing. Long prompts and long queues are compared with others of
the same size. Reads no clock.

The constants are from simulation (`python -m bench.fleet`, docs/scale.md). Shorter means or finer steps separate equal
engines by chance; coarser ones miss a half as fast engine among two.
"""

from __future__ import annotations

import math

FIT_OVER = 256
"""Requests in the mean of the fit, about; without a quarter of them there is no fit."""
MEAN_OVER = 24
"""Requests in the mean of one engine, about."""
PRIOR_REQUESTS = 6
"""Prior requests at mean speed for each engine: one slow request makes no slow engine."""
STEPS_PER_DOUBLING = 2
"""Steps per factor of two. Slowness is rounded to these steps, so that small differences count as none."""
HYSTERESIS = 1.0
"""Hysteresis, in steps."""
MAX_OUTLIER = 3.0
"""Bound on one request's time over the expected time: a single stall says little of later requests. So no engine counts as
more than twice as slow from one request."""
MEASUREMENT_TTL_S = 60.0
"""Lifetime of a measurement. After it, an engine that was avoided as slow is tried again."""


class LinearFit:
    """Linear fit of time over work for all engines, with exponential forgetting."""

    def __init__(self) -> None:
        self._count = 0
        self._work = self._took_s = self._variance = self._covariance = 0.0

    def __bool__(self) -> bool:
        """True if enough requests were measured."""
        return self._count >= FIT_OVER // 4

    def expected_s(self, work: int) -> float:
        """Return the expected time for an amount of work: monotonic, and not negative."""
        if not self._work:
            return self._took_s
        steepest = self._took_s / self._work  # a line through the origin
        slope = self._covariance / self._variance if self._variance > 0 else steepest
        return self._took_s + min(max(slope, 0.0), steepest) * (work - self._work)

    def note(self, work: int, took_s: float) -> None:
        """Add one request."""
        self._count = min(self._count + 1, FIT_OVER)
        share = 1 / self._count
        by_work, by_time = work - self._work, took_s - self._took_s
        self._work += share * by_work
        self._took_s += share * by_time
        self._variance += share * ((1 - share) * by_work * by_work - self._variance)
        self._covariance += share * ((1 - share) * by_work * by_time - self._covariance)


class EngineSpeeds:
    """Measured slowness of one engine."""

    def __init__(self, usual: LinearFit) -> None:
        self._usual = usual
        self._num = self._took_s = self._expected_s = 0.0
        """Decayed sums over its requests."""
        self._noted_s = -math.inf
        self._step = 0
        """Slowness as a power of two, times `STEPS_PER_DOUBLING`."""

    def note(self, work: int, took_s: float, now_s: float) -> None:
        """Add a request: its time to first token, and the tokens before that, its own prompt included."""
        usual = self._usual
        if not (0 < took_s < math.inf and work > 0):
            return
        if not usual:
            usual.note(work, took_s)
            return
        expected_s = usual.expected_s(work)
        took_s = min(took_s, MAX_OUTLIER * expected_s)
        usual.note(work, took_s)
        if not self._is_known(now_s):
            self._num = self._took_s = self._expected_s = 0.0
            self._step = 0
        self._noted_s = now_s
        self._num += 1 - self._num / MEAN_OVER
        self._took_s += took_s - self._took_s / MEAN_OVER
        self._expected_s += expected_s - self._expected_s / MEAN_OVER
        slowness = (self._num * self._took_s / self._expected_s + PRIOR_REQUESTS) / (
            self._num + PRIOR_REQUESTS
        )
        at = STEPS_PER_DOUBLING * math.log2(slowness)
        if abs(at - self._step) > HYSTERESIS:
            self._step = round(at)

    def slowness(self, now_s: float) -> float:
        """Return the time per token relative to the mean of all engines; 1 if unknown."""
        return 2.0 ** (self._step / STEPS_PER_DOUBLING) if self._step and self._is_known(now_s) else 1.0

    def forget(self) -> None:
        """Forget the measurements: the engine restarted, perhaps on other hardware."""
        self._noted_s = -math.inf

    def _is_known(self, now_s: float) -> bool:
        return now_s - self._noted_s < MEASUREMENT_TTL_S
