"""Who may enter: a bounded number of live requests and of tokens they owe, from the end of the boot until the drain.

This is where load is refused that nobody could bear; the core refuses only what will miss its own deadline. Behind
it, sends never block. A worker that is being replaced is no reason to refuse: the request waits for it, and the client
sees a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from quintet.frontend.load_balancing.load_balancer import Workers
from quintet.frontend.load_balancing.queued_tokens import QueuedTokens
from quintet.frontend.prompt_size import embeds_bytes
from quintet.wire.config import FrontendConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.messages import Prompt
from quintet.wire.metrics import CounterSeries, Metrics
from quintet.wire.params import SamplingParams

MAX_RETRY_S = 60
SHORT_RETRY_S = 2
BOOTED_ROLES = (Role.CORE, Role.EXECUTOR)
"""What must have been ready once: loading a model takes too long to hold a connection for."""
_WINDOW_S = 5.0
MAX_EMBEDS_BYTES = 512 << 20
"""Vectors that the prompts of one frontend's requests may hold: here, on their way and in the core, until they end."""


class Occupancy(Protocol):
    """What the door looks at: `quintet.frontend.sessions.Sessions`."""

    @property
    def slots(self) -> Workers:
        """Who is there."""

    @property
    def num_open_choices(self) -> int:
        """Choices that have not ended."""

    @property
    def num_ended(self) -> int:
        """Requests that have ended so far."""

    @property
    def num_tokens(self) -> int:
        """Outputs received so far."""

    @property
    def backlog(self) -> QueuedTokens:
        """What the live requests owe."""


class RateMeter:
    """How fast a count grows: over the window that is running, or where nothing came in it yet, over the last."""

    def __init__(self, count: Callable[[], int], clock: Callable[[], float]) -> None:
        self._count = count
        self._clock = clock
        self._since, self._before = clock(), count()
        self._rate = 0.0

    def seconds_for(self, amount: int) -> int:
        """Estimate the whole seconds until the count will have grown by ``amount``."""
        now, count = self._clock(), self._count()
        elapsed_s = now - self._since
        if elapsed_s > 0:
            recent = (count - self._before) / elapsed_s
            self._rate = recent if recent > 0 or elapsed_s >= _WINDOW_S else self._rate
        if elapsed_s >= _WINDOW_S:
            self._since, self._before = now, count
        if self._rate <= 0:
            return MAX_RETRY_S if elapsed_s >= _WINDOW_S else SHORT_RETRY_S
        return max(1, min(MAX_RETRY_S, math.ceil(amount / self._rate)))


class Admission:
    """Decides about each request before anything is sent."""

    def __init__(
        self,
        load: Occupancy,
        config: FrontendConfig,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._endings = RateMeter(lambda: load.num_ended, clock)
        self._leaving = RateMeter(lambda: load.backlog.num_ever - self._num_owed(), clock)
        self.draining = False
        self._refused_full = _refused(metrics, "max_num_queued_reqs")
        self._refused_tokens = _refused(metrics, "max_num_queued_tokens")
        self._refused_unready = _refused(metrics, "not_ready")

    def enter(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raise `RequestError`, with the time to try again, unless these prompts may be submitted now."""
        self.reenter(len(prompts) * params.n)
        self._check_tokens(sum(self._load.backlog.cost(prompt, params) for prompt in prompts))
        num_bytes = sum(map(embeds_bytes, prompts))
        if num_bytes:
            self._check_embeds(num_bytes)

    def reenter(self, num_requests: int) -> None:
        """Likewise for requests that were entered before, and whose tokens were computed in part."""
        if num_requests > self._max_requests:
            raise RequestError(
                ErrorCode.INVALID,
                f"n times the number of prompts is {num_requests}; this server holds at most {self._max_requests} "
                "requests at a time. Send fewer, or raise --max-queued-requests.",
                "n",
            )
        self._check_open()
        self._check_requests(num_requests)

    def _check_open(self) -> None:
        if self.draining:
            self._refused_unready.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                "The server is shutting down and takes no new requests.",
                retry_s=SHORT_RETRY_S,
            )
        booting = [role for role in BOOTED_ROLES if role not in self._load.slots.ever_ready]
        if booting:
            self._refused_unready.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"The server is still starting: its {' and '.join(booting)} did not report yet. Try again shortly.",
                retry_s=SHORT_RETRY_S,
            )

    def _check_requests(self, num_requests: int) -> None:
        held = self._load.num_open_choices
        excess = held + num_requests - self._max_requests
        if excess > 0:
            self._refused_full.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"The server holds {held} requests and was sent {num_requests} more; it takes at most "
                f"{self._max_requests} at a time. Try again later, or raise --max-queued-requests.",
                retry_s=self._endings.seconds_for(excess),
            )

    def _check_tokens(self, num_tokens: int) -> None:
        """Refuse what comes on top of too much; an empty house takes a request of any size."""
        owed = self._num_owed()
        excess = owed + num_tokens - self._max_tokens
        if excess > 0 and owed > 0:
            self._refused_tokens.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"The requests that the server holds owe {owed} tokens, prompts and outputs, and this one would add "
                f"about {num_tokens}; it takes at most {self._max_tokens} at a time. Try again later, lower max_tokens, "
                "or raise --max-queued-tokens.",
                retry_s=self._leaving.seconds_for(min(excess, owed)),
            )

    def _check_embeds(self, num_bytes: int) -> None:
        held = self._load.backlog.embeds_bytes
        if held and held + num_bytes > MAX_EMBEDS_BYTES:
            self._refused_full.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"Prompts as vectors hold {held} bytes here, and this request would add {num_bytes}; at most "
                f"{MAX_EMBEDS_BYTES} are held at a time. Try again later.",
                "prompt_embeds",
                retry_s=self._endings.seconds_for(1),
            )

    def _num_owed(self) -> int:
        return self._load.backlog.num_owed(self._load.num_tokens)


def _refused(metrics: Metrics, reason: str) -> CounterSeries:
    return metrics.counter("admission_rejections", "Requests refused at the door.", reason=reason)
