"""How fast each engine is beside the others: from what stood before requests when they were sent, and when they began.

What stands before a request's first token is what `quintet.frontend.load_balancing.load_balancer.choose` goes by, in
tokens. Here is learnt how long so many take on average, as a line: something for any request, and so much for each
token. An engine is as slow as its requests took longer than the line says. So nothing has to be told by engines,
whatever they are, and one that had long prompts, or found many of them, is compared with what others took for the
like of that. Reads no clock.

The numbers are from the simulation (`python -m bench.fleet`, docs/scale.md): with shorter memories, or finer steps, engines that
are equal are told apart by what they happened to get; with coarser ones half the speed is not seen where there are two engines.
"""

from __future__ import annotations

import math

USUAL_OVER = 256
"""Requests that the line is a mean of, about; before a quarter of them there is none."""
OVER = 24
"""Requests that an engine's slowness is a mean of, about."""
DOUBT = 6
"""Requests that took what is usual, which every engine is taken to have had besides: one slow request is no slow engine."""
STEPS = 2
"""To twice as long. Engines are told apart by these steps alone, so that those which differ by little differ by nothing."""
CERTAIN = 1.0
"""Of a step, from where an engine is until it is taken to be elsewhere."""
SURPRISE = 3.0
"""A request counts as no more than so many times what it should have taken: one that hung says little of the next. So nobody is
taken to be more than twice as slow, whatever it is."""
KNOWN_S = 60.0
"""What was measured last so long ago is not known any more. So who is avoided because it was slow is tried again."""


class LinearFit:
    """What work takes at any of the engines: a line through what was measured, which fades."""

    def __init__(self) -> None:
        self._count = 0
        self._work = self._took_s = self._variance = self._covariance = 0.0

    def __bool__(self) -> bool:
        """Whether enough was measured."""
        return self._count >= USUAL_OVER // 4

    @property
    def took_s(self) -> float:
        """What requests took on average."""
        return self._took_s

    def expected_s(self, work: int) -> float:
        """Return how long so much work takes: never less for more, and nothing for less than nothing."""
        if not self._work:
            return self._took_s
        steepest = self._took_s / self._work  # a line through nothing
        slope = self._covariance / self._variance if self._variance > 0 else steepest
        return self._took_s + min(max(slope, 0.0), steepest) * (work - self._work)

    def note(self, work: int, took_s: float) -> None:
        """Take in one more request."""
        self._count = min(self._count + 1, USUAL_OVER)
        share = 1 / self._count
        by_work, by_time = work - self._work, took_s - self._took_s
        self._work += share * by_work
        self._took_s += share * by_time
        self._variance += share * ((1 - share) * by_work * by_work - self._variance)
        self._covariance += share * ((1 - share) * by_work * by_time - self._covariance)


class EngineSpeeds:
    """One engine's."""

    def __init__(self, usual: LinearFit) -> None:
        self._usual = usual
        self._num = self._took_s = self._expected_s = 0.0
        """Sums over its requests that fade."""
        self._noted_s = -math.inf
        self._step = 0
        """How slow it is, in so many steps to twice as long."""

    def note(self, work: int, took_s: float, now_s: float) -> None:
        """Learn from a request that began so long after it was sent, with so many tokens before its first: the prompt's too."""
        usual = self._usual
        if not (0 < took_s < math.inf and work > 0):
            return
        if not usual:
            usual.note(work, took_s)
            return
        expected_s = usual.expected_s(work)
        took_s = min(took_s, SURPRISE * expected_s)
        usual.note(work, took_s)
        if not self._is_known(now_s):
            self._num = self._took_s = self._expected_s = 0.0
            self._step = 0
        self._noted_s = now_s
        self._num += 1 - self._num / OVER
        self._took_s += took_s - self._took_s / OVER
        self._expected_s += expected_s - self._expected_s / OVER
        slowness = (self._num * self._took_s / self._expected_s + DOUBT) / (self._num + DOUBT)
        at = STEPS * math.log2(slowness)
        if abs(at - self._step) > CERTAIN:
            self._step = round(at)

    def slowness(self, now_s: float) -> float:
        """Return how many times as long as engines usually do it takes; 1 where nothing is known."""
        return 2.0 ** (self._step / STEPS) if self._step and self._is_known(now_s) else 1.0

    def forget(self) -> None:
        """It has begun anew, perhaps elsewhere."""
        self._noted_s = -math.inf

    def _is_known(self, now_s: float) -> bool:
        return now_s - self._noted_s < KNOWN_S
