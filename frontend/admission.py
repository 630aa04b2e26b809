"""Who may enter: a bounded number of live requests, from the end of the boot until the server drains.

This is the one place where load is refused; behind it, sends never block. A worker that is being replaced is no reason
to refuse: the request waits for it, and the client sees a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quintet.frontend.dialects.errors import RetryLater
from quintet.frontend.sessions import Sessions
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.metrics import Metrics

MAX_RETRY_S = 60
SHORT_RETRY_S = 2
BOOTED_ROLES = (Role.CORE, Role.EXECUTOR)
"""What must have been ready once: loading a model takes too long to hold a connection for."""
_WINDOW_S = 5.0


class Admission:
    """Decides about each request before anything is sent."""

    def __init__(
        self,
        sessions: Sessions,
        max_requests: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._max_requests = max_requests
        self._clock = clock
        self._window = (clock(), 0)
        self._rate = 0.0
        self.draining = False
        self._refused_full = metrics.counter(
            "admission_rejections", "Requests refused at the door.", reason="max_num_queued_reqs"
        )
        self._refused_unready = metrics.counter(
            "admission_rejections", "Requests refused at the door.", reason="not_ready"
        )

    def enter(self, num_requests: int = 1) -> None:
        """Raise `RetryLater` unless this many more requests may be submitted now; each choice counts as one."""
        if num_requests > self._max_requests:
            raise RequestError(
                ErrorCode.INVALID,
                f"n times the number of prompts is {num_requests}; this server holds at most {self._max_requests} "
                "requests at a time. Send fewer, or raise --max-queued-requests.",
                "n",
            )
        if self.draining:
            self._refused_unready.inc()
            raise RetryLater(
                ErrorCode.UNAVAILABLE, "The server is shutting down and takes no new requests.", SHORT_RETRY_S
            )
        booting = [role for role in BOOTED_ROLES if role not in self._sessions.seats.ever_ready]
        if booting:
            self._refused_unready.inc()
            raise RetryLater(
                ErrorCode.UNAVAILABLE,
                f"The server is still starting: its {' and '.join(booting)} did not report yet. Try again shortly.",
                SHORT_RETRY_S,
            )
        excess = self._sessions.num_open_choices + num_requests - self._max_requests
        if excess > 0:
            self._refused_full.inc()
            raise RetryLater(
                ErrorCode.OVERLOADED,
                f"The server holds {self._sessions.num_open_choices} requests and was sent {num_requests} more; it takes at "
                f"most {self._max_requests} at a time. Try again later, or raise --max-queued-requests.",
                self._retry_after(excess),
            )

    def _retry_after(self, excess: int) -> int:
        """Estimate the seconds until ``excess`` requests will have ended, from how many ended lately."""
        now, ended = self._clock(), self._sessions.num_ended
        since, before = self._window
        if now > since:
            recent = (ended - before) / (now - since)
            self._rate = recent if recent or now - since >= _WINDOW_S else self._rate
        if now - since >= _WINDOW_S:
            self._window = (now, ended)
        if self._rate <= 0:
            return MAX_RETRY_S if now - since >= _WINDOW_S else SHORT_RETRY_S
        return max(1, min(MAX_RETRY_S, math.ceil(excess / self._rate)))
