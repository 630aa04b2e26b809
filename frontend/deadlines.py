"""Request deadlines: one timer for all requests of a frontend that have one.

The core enforces deadlines too, so that it computes no late output. This timer covers requests without a
live core, and fires at the deadline itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quintet.frontend.streams import Stream
from quintet.process.deadlines import DeadlineHeap
from quintet.wire.errors import ErrorCode, RequestError


class DeadlineTimer:
    """Calls ``on_expired`` once for each watched request that has not ended by its deadline."""

    def __init__(
        self, on_expired: Callable[[Stream], None], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._on_expired = on_expired
        self._clock_ns = clock_ns
        self._heap: DeadlineHeap[Stream] = DeadlineHeap(lambda stream: stream.ended)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def watch(self, stream: Stream) -> None:
        """Watch a request until it ends or expires. Call from the event loop."""
        self._heap.watch(stream.submit.spec.deadline_ns, stream)
        self._arm()

    def _arm(self) -> None:
        """Arm the timer for the earliest deadline."""
        first_ns = self._heap.first_ns
        if first_ns is None:
            return
        if self._timer is not None:
            if self._timer_ns <= first_ns:
                return
            self._timer.cancel()
        self._timer_ns = first_ns
        wait_s = max(0.0, (first_ns - self._clock_ns()) * 1e-9)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.expire()
        self._arm()

    def expire(self) -> None:
        """Call ``on_expired`` for every request past its deadline."""
        for stream in self._heap.due(self._clock_ns()):
            if not stream.ended:  # the callback for one request may end others
                self._on_expired(stream)


def is_expired_by_core(stream: Stream, now_ns: int) -> bool:
    """Test whether the core aborted a request for its deadline, before the timer here fired."""
    return not stream.is_cancelled and 0 < stream.submit.spec.deadline_ns <= now_ns


def expired(stream: Stream) -> RequestError:
    """Build the error for a request past its deadline."""
    given_s = (stream.submit.spec.deadline_ns - stream.submit.spec.arrival_ns) * 1e-9
    within = f"within its timeout of {given_s:g} s" if given_s > 0 else "before its deadline"
    return RequestError(
        ErrorCode.DEADLINE,
        f"The request did not end {within}; output tokens so far: {stream.num_output_tokens}. Send a longer timeout, or "
        "lower max_tokens.",
    )
