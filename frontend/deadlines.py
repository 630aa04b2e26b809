"""Until when the clients want their answers: one timer for all requests of a frontend that have a deadline.

Owns no request: it tells, once, of each whose time is over. The core keeps to deadlines as well, so that it computes
nothing for nobody; this timer is for requests that no core knows yet, or whose core is gone, and for the moment of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quintet.frontend.streams import Stream
from quintet.process.deadlines import DeadlineHeap
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.messages import Finish, FinishReason


class DeadlineTimer:
    """Calls ``on_expired`` for each watched request that has not ended by its deadline."""

    def __init__(
        self, on_expired: Callable[[Stream], None], clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._on_expired = on_expired
        self._clock_ns = clock_ns
        self._heap: DeadlineHeap[Stream] = DeadlineHeap(lambda stream: stream.ended)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def watch(self, stream: Stream) -> None:
        """Look after a request until it ends or its deadline comes. Call from the event loop."""
        self._heap.watch(stream.submit.spec.deadline_ns, stream)
        self._arm()

    def _arm(self) -> None:
        """Have the timer fire at the earliest deadline."""
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
        """Tell of every request whose deadline has passed."""
        for stream in self._heap.due(self._clock_ns()):
            if not stream.ended:  # telling of one may end others
                self._on_expired(stream)


def was_too_late(stream: Stream, finish: Finish, now_ns: int) -> bool:
    """Return whether the core ended the request because its deadline had passed: its clock was first."""
    is_unasked = finish.reason is FinishReason.ABORT and not stream.is_cancelled
    return is_unasked and 0 < stream.submit.spec.deadline_ns <= now_ns


def expired(stream: Stream) -> RequestError:
    """Make the error for a request whose time is over."""
    given_s = (stream.submit.spec.deadline_ns - stream.submit.spec.arrival_ns) * 1e-9
    num_tokens = stream.num_output_tokens
    so_far = f"{num_tokens} tokens of its output had come" if num_tokens else "none of its output had come"
    within = f"within the {given_s:g} s that it was given" if given_s > 0 else "before its deadline"
    return RequestError(
        ErrorCode.DEADLINE,
        f"The request did not end {within}; {so_far}. Allow more time, or ask for less.",
    )
