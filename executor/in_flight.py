"""The steps that were begun and whose results the core does not have, and the thread that waits for the device.

              begin                                        StepsEnded
    plans ────────────▶ [ step N | step N + 1 ] ─────────────────────────▶ results
                             ▲                                   ▲
                             └─ the waiting thread blocks here   └─ and rings the loop's bell

Owns their order, and that each ring counts for one of them. Knows nothing of what a step is. The thread is started by
the first step that does not end at once: a worker that computes in `begin` never has one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quintet.executor.interface import Pending
from quintet.process.runtime import Receives
from quintet.process.wakeup import Wakeup
from quintet.wire.step import StepPlan, StepsEnded

MAX_FAREWELL_S = 1.0
"""The waiting thread may be in a step that never ends; nobody stays for that."""


@dataclass(slots=True, eq=False)
class Begun:
    """A step that was begun."""

    plan: StepPlan
    pending: Pending
    num_tenants: int
    """Slots that had a tenant after the plan."""
    free_ns: int
    """When the newest result before it had been sent."""
    begun_ns: int
    is_settled: bool = False
    """Its result was sent, or nobody wants it any more; the ring for it may be still to come."""


class InFlight:
    """Used from the loop only."""

    def __init__(self, inbox: Receives) -> None:
        """``inbox`` is what the loop waits at."""
        self._inbox = inbox
        self._steps: deque[Begun] = deque()
        self._bell: Wakeup | None = None
        self._waited_for: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __bool__(self) -> bool:
        """Whether a ring is still to come."""
        return bool(self._steps)

    def add(self, begun: Begun) -> None:
        """Have the loop told when this step ends."""
        if self._bell is None:
            self._bell = Wakeup(StepsEnded)
            self._inbox.hang(self._bell)
            self._thread = threading.Thread(
                target=self._wait_for_each, args=(self._bell,), name="device", daemon=True
            )
            self._thread.start()
        self._steps.append(begun)
        self._waited_for.put(begun.pending)

    def ended(self, count: int) -> Iterator[Begun]:
        """Take out so many steps, in order, and yield those that are still wanted when it is their turn."""
        for _ in range(count):
            begun = self._steps.popleft()
            if not begun.is_settled:
                begun.is_settled = True
                yield begun

    def unsettled(self) -> Iterator[Begun]:
        """Yield the steps that are still wanted, in order, before the rings for them."""
        for begun in self._steps:
            if not begun.is_settled:
                begun.is_settled = True
                yield begun

    def forget(self) -> int:
        """Want none of them any more. Return how many were."""
        return sum(1 for _ in self.unsettled())

    def _wait_for_each(self, bell: Wakeup) -> None:
        while (pending := self._waited_for.get()) is not None:
            with contextlib.suppress(Exception):  # the loop asks for the result, and is told there
                pending.wait()
            bell.ring()

    def close(self) -> None:
        """End the thread, unless a step keeps it."""
        if self._thread is None or self._bell is None:
            return
        self._waited_for.put(None)
        self._thread.join(MAX_FAREWELL_S)
        if not self._thread.is_alive():
            self._bell.close()
