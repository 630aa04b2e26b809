"""Predicts the end of a graph step, to avoid the latency of a blocking wait.

The driver wakes a blocked thread 20 to 100 µs after the event, later in a virtual machine: 2 % of a step of 5 ms. Steps of one
graph take nearly constant time, so the thread sleeps until shortly before the predicted end and then polls. Eager steps are not
predicted; their waits block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from quintet.executor.backends.cuda.graphs import GraphSize

SPIN_S = 200e-6
"""Polling time before and after the predicted end."""


class StepClock:
    """Predicts the end of a step by the device time of the last step of the same graph. One per device."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._duration_s: dict[GraphSize, float] = {}
        """Device time by size of the graph."""
        self._busy_until_s = 0.0

    def launched(self, size: GraphSize | None) -> float | None:
        """Return the predicted end of the step just launched, by ``time.perf_counter``; None if unknown.

        size: of its graph; None for an eager step.
        """
        now = self._clock()
        duration = None if size is None else self._duration_s.get(size)
        if duration is None:
            self._busy_until_s = now
            return None
        self._busy_until_s = max(now, self._busy_until_s) + duration
        return self._busy_until_s

    def ended(self, size: GraphSize | None, device_ms: float) -> None:
        """Record the duration of a step."""
        if size is not None:
            self._duration_s[size] = device_ms * 1e-3


def wait_until_done(
    is_done: Callable[[], bool],
    block: Callable[[], None],
    expected_end_s: float | None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for an event: sleep until `SPIN_S` before the expected end, poll until `SPIN_S` after it, then block."""
    if expected_end_s is not None:
        early_s = expected_end_s - SPIN_S - clock()
        if early_s > 0.0:
            sleep(early_s)
        while clock() < expected_end_s + SPIN_S:
            if is_done():
                return
            os.sched_yield()  # sleep(0) takes 60 us on Linux
    block()
