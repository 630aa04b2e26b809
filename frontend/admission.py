"""Admission control: limits on live requests and on their pending tokens, from the end of start-up until drain.

Overload is rejected here; the core rejects requests that would miss their deadline, that are too long, or that crashed
executors. After admission, sends never block. A worker under replacement is no reason to reject: the request waits for
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from quintet.frontend.load_balancing.load_ledger import LoadLedger, embeds_bytes
from quintet.wire.config import FrontendConfig
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.ids import Role
from quintet.wire.messages import Prompt
from quintet.wire.metrics import CounterSeries, Metrics
from quintet.wire.params import SamplingParams

MAX_RETRY_S = 60
SHORT_RETRY_S = 2
BOOTED_ROLES = (Role.CORE, Role.EXECUTOR)
"""Roles that must have been ready once. Loading a model takes too long to hold a connection."""
_WINDOW_S = 5.0
MAX_EMBEDS_BYTES = 512 << 20
"""Maximum bytes of prompt embeddings held by the live requests of one frontend: here, in transit and in the core."""


class RateMeter:
    """Growth rate of a counter over the current window, or over the last window while the current one has no growth."""

    def __init__(self, count: Callable[[], int], clock: Callable[[], float]) -> None:
        self._count = count
        self._clock = clock
        self._since, self._before = clock(), count()
        self._rate = 0.0

    def seconds_for(self, amount: int) -> int:
        """Estimate the whole seconds until the counter grows by ``amount``."""
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
    """Accepts or rejects each request before anything is sent."""

    def __init__(
        self,
        ledger: LoadLedger,
        config: FrontendConfig,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._end_rate = RateMeter(lambda: ledger.num_ended, clock)
        self._token_rate = RateMeter(lambda: ledger.num_added - ledger.num_pending, clock)
        self.draining = False
        self._rejected_full = _rejections(metrics, "max_num_queued_reqs")
        self._rejected_tokens = _rejections(metrics, "max_num_queued_tokens")
        self._rejected_unready = _rejections(metrics, "not_ready")

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Raise `RequestError` with a retry time if these prompts exceed the limits."""
        self.check_resumed(len(prompts) * params.n)
        self._check_tokens(sum(self._ledger.cost(prompt, params) for prompt in prompts))
        num_bytes = sum(map(embeds_bytes, prompts))
        if num_bytes:
            self._check_embeds(num_bytes)

    def check_resumed(self, num_requests: int) -> None:
        """Check resumed requests. The token limit does not apply: part of their tokens was computed."""
        self.check_number(num_requests)
        self._check_open()
        self._check_requests(num_requests)

    def check_number(self, num_requests: int) -> None:
        """Raise `RequestError` for more requests than the server ever accepts. Cheap: call before building prompts."""
        if num_requests > self._max_requests:
            raise invalid(
                f"n times the number of prompts is {num_requests}; this server accepts at most {self._max_requests} "
                "concurrent requests. Send fewer, or raise --max-queued-requests.",
                "n",
            )

    def _check_open(self) -> None:
        if self.draining:
            self._rejected_unready.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                "The server is shutting down and accepts no new requests.",
                retry_s=SHORT_RETRY_S,
            )
        booting = [role for role in BOOTED_ROLES if role not in self._ledger.workers.roles_seen_ready]
        if booting:
            self._rejected_unready.inc()
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"The server is still starting: {' and '.join(booting)} not ready yet. Try again shortly.",
                retry_s=SHORT_RETRY_S,
            )

    def _check_requests(self, num_requests: int) -> None:
        held = self._ledger.num_open_choices
        excess = held + num_requests - self._max_requests
        if excess > 0:
            self._rejected_full.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"The server has {held} live requests and was sent {num_requests} more; the limit is "
                f"{self._max_requests}. Retry later, or raise --max-queued-requests.",
                retry_s=self._end_rate.seconds_for(excess),
            )

    def _check_tokens(self, num_tokens: int) -> None:
        """Enforce the limit of pending tokens. Never reject when no other request is active."""
        pending = self._ledger.num_pending
        excess = pending + num_tokens - self._max_tokens
        if excess > 0 and pending > 0:
            self._rejected_tokens.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{pending} prompt and output tokens are pending, and this request would add "
                f"about {num_tokens}; the limit is {self._max_tokens}. Retry later, lower max_tokens, "
                "or raise --max-queued-tokens.",
                retry_s=self._token_rate.seconds_for(min(excess, pending)),
            )

    def _check_embeds(self, num_bytes: int) -> None:
        held = self._ledger.embeds_bytes
        if held and held + num_bytes > MAX_EMBEDS_BYTES:
            self._rejected_full.inc()
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"Live prompt embeddings hold {held} bytes, and this request would add {num_bytes}; the limit is "
                f"{MAX_EMBEDS_BYTES}. Retry later.",
                "prompt_embeds",
                retry_s=self._end_rate.seconds_for(1),
            )


def _rejections(metrics: Metrics, reason: str) -> CounterSeries:
    return metrics.counter(
        "admission_rejections", "Requests rejected on admission, by reason.", reason=reason
    )
