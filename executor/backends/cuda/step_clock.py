"""Predicts when a captured step ends, and waits for it without the latency of a blocking wait.

A thread that blocks in the driver is woken 20 to 100 microseconds after the event, more in a virtual machine: 2 % of a step of
5 ms. Steps of one graph take nearly the same time, so the thread sleeps until shortly before the predicted end and polls from
there. Steps launched kernel by kernel are not predicted: their waits block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_S = 200e-6
"""Polled before the predicted end, and as long behind it."""


class StepClock:
    """Predicts ends of steps from the device time of the last step of the same graph. One per device."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._taken_s: dict[int, float] = {}
        """Device time by rows of the graph."""
        self._busy_until_s = 0.0

    def launched(self, graph_rows: int | None) -> float | None:
        """Return when a step that was just launched will end, by ``time.perf_counter``; None if it is unknown.

        graph_rows: of its graph; None for a step without one.
        """
        now = self._clock()
        taken = None if graph_rows is None else self._taken_s.get(graph_rows)
        if taken is None:
            self._busy_until_s = now
            return None
        self._busy_until_s = max(now, self._busy_until_s) + taken
        return self._busy_until_s

    def ended(self, graph_rows: int | None, device_ms: float) -> None:
        """Learn what a step took."""
        if graph_rows is not None:
            self._taken_s[graph_rows] = device_ms * 1e-3


def wait_until_done(
    is_done: Callable[[], bool],
    block: Callable[[], None],
    expected_end_s: float | None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    relax: Callable[[], None] = os.sched_yield,
) -> None:
    """Wait for an event: sleep until `SPIN_S` before the expected end, poll until as long behind it, then block."""
    if expected_end_s is not None:
        early_s = expected_end_s - SPIN_S - clock()
        if early_s > 0.0:
            sleep(early_s)
        while clock() < expected_end_s + SPIN_S:
            if is_done():
                return
            relax()  # not sleep(0), which takes 60 us on Linux
    block()
