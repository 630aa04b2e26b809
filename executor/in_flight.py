"""The steps in flight, and the thread that waits for the device.

              begin                                        StepsEnded
    plans ────────────▶ [ step N | step N + 1 ] ─────────────────────────▶ results
                             ▲                                   ▲
                             └─ the waiting thread blocks here   └─ and wakes the loop

A step is in flight from its start until its result is sent. This module owns their order; each wakeup counts for one
step. The first step that does not end immediately starts the thread; a worker that computes in `begin` never needs
one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quintet.executor.interface import Pending
from quintet.process.wakeup import Wakeup
from quintet.process.wires import Receives
from quintet.wire.step import StepPlan, StepsEnded

JOIN_TIMEOUT_S = 1.0
"""Join timeout at close: the thread may be blocked in a step that hangs."""


@dataclass(slots=True, eq=False)
class StartedStep:
    """A started step."""

    plan: StepPlan
    pending: Pending
    num_active_slots: int
    """Slots in use after the plan."""
    free_ns: int
    """Time at which the result before it was sent."""
    started_ns: int
    is_settled: bool = False
    """The result was sent or cancelled; the step's wakeup may still be outstanding."""


class InFlight:
    """The queue of steps in flight. Used by the loop only."""

    def __init__(self, inbox: Receives) -> None:
        """``inbox``: the inbox at which the loop waits."""
        self._inbox = inbox
        self.steps: deque[StartedStep] = deque()
        """Steps with an outstanding wakeup, oldest first."""
        self._wakeup: Wakeup | None = None
        self._to_wait_for: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, started: StartedStep) -> None:
        """Append a step; the thread wakes the loop at its end."""
        if self._wakeup is None:
            self._wakeup = Wakeup(StepsEnded)
            self._inbox.add_wakeup(self._wakeup)
            self._thread = threading.Thread(
                target=self._wait_for_each, args=(self._wakeup,), name="device", daemon=True
            )
            self._thread.start()
        self.steps.append(started)
        self._to_wait_for.put(started.pending)

    def ended(self, count: int) -> Iterator[StartedStep]:
        """Remove the ``count`` oldest steps, and yield the unsettled ones in order."""
        for _ in range(count):
            started = self.steps.popleft()
            if not started.is_settled:
                started.is_settled = True
                yield started

    def unsettled(self) -> Iterator[StartedStep]:
        """Mark and yield the unsettled steps in order, before their wakeups."""
        for started in self.steps:
            if not started.is_settled:
                started.is_settled = True
                yield started

    def forget(self) -> int:
        """Cancel all steps. Return the number that were unsettled."""
        return sum(1 for _ in self.unsettled())

    def _wait_for_each(self, wakeup: Wakeup) -> None:
        while (pending := self._to_wait_for.get()) is not None:
            with contextlib.suppress(Exception):  # `result` raises it again in the loop
                pending.wait()
            wakeup.notify()

    def close(self) -> None:
        """Stop the thread, unless a step blocks it."""
        if self._thread is None or self._wakeup is None:
            return
        self._to_wait_for.put(None)
        self._thread.join(JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._wakeup.close()
