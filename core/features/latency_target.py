"""Latency target: limit the prompt tokens of a step so that decoding requests keep a target time between tokens.

Every stream gets its next token when the step ends, so prefill delays all streams. With a target for the step time,
prompts get what decode rows leave of it. The measured speed converts time to tokens (`Throughput`). The first prompt
gets its whole chunk first, because only complete prompts produce tokens. Off unless a target is set.

With many waiting prompts a step takes the full target. The sum of waiting time and time between tokens is fixed by
the arrival rate (Little, 1961). With few, a step takes two thirds of it: first tokens arrive as soon, and streams are
smoother. With many streams it is the full target again, because short steps would leave prompts too little.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState

MIN_TOKENS = 32
"""Minimum prompt tokens per step: reading the weights takes as long as multiplying with them."""
FIRST_TOKENS = 128
"""Tokens per step before any step was measured."""
WAITING_STEPS = 8
"""With more waiting prompts than fill this many steps, steps grow, up to the target."""
MANY_REQUESTS = 16
"""With more live requests than this, every step with prompts takes the full target."""
SINGLE_REQUEST_FACTOR = 3
"""Multiple of the target for a single live request: another one may arrive meanwhile."""


def build(setup: Setup) -> Feature | None:
    target_ms = setup.scheduler.step_target_ms
    if target_ms <= 0 or not setup.scheduler.enable_chunked_prefill:
        return None

    def limit_tokens(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        num_taken = state.limits.max_batched - budget
        num_uncomputed = num_taken + (wanted if request.status is Status.RUNNING else 0)
        return max(0, min(wanted, _tokens_now(state, num_uncomputed, target_ms) - num_taken))

    return Feature("latency_target", limit_tokens=limit_tokens)


def _tokens_now(state: SchedulerState, num_uncomputed: int, target_ms: int) -> int:
    """Return the maximum tokens of this step. ``num_uncomputed``: tokens in the step, including the calling request's."""
    most = most_tokens(state, target_ms)
    if len(state.live) == 1 or len(state.live) > MANY_REQUESTS:
        return most
    for request in state.waiting:
        if num_uncomputed >= most * WAITING_STEPS:
            return most
        num_uncomputed += request.length
    least = max(most * 2 // 3, len(state.running) + MIN_TOKENS)
    return min(most, max(least, num_uncomputed // WAITING_STEPS))


def most_tokens(state: SchedulerState, target_ms: int) -> int:
    """Return the maximum tokens of a step under load, all rows together; the budget if the target is 0."""
    if target_ms <= 0:
        return state.limits.max_batched
    num_tokens = state.throughput.tokens_in(target_ms * 1_000_000)
    if num_tokens is None:
        num_tokens = FIRST_TOKENS
    if len(state.live) == 1:
        num_tokens *= SINGLE_REQUEST_FACTOR
    return max(num_tokens, len(state.running) + MIN_TOKENS)
