"""Step time: prompts are computed in pieces so small that nobody who decodes waits much longer than asked for.

Every stream gets its next token when the step ends, so a step full of prompts holds up all streams. With a target for
a step's time, prompts get what the target leaves beside the rows that decode; how many tokens that is, the executor's
results tell (`Pace`). The pieces go to the first prompt first: one that is complete serves its client, two halves serve
nobody. Off unless a target is set.

The target is what a step takes when many prompts wait: only a longer step lets them begin sooner then, since the wait for
the first token and the time between tokens are together what the rate leaves each of so many clients (Little, 1961).
While few wait, a step takes two thirds of it: their first tokens come as soon, and the streams flow better. Not so beside
many streams: what they compute takes its share of every step first, and in short steps leaves prompts too little.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.request import Request, Status
from quintet.core.scheduler_state import SchedulerState

LEAST_TOKENS = 32
"""Prompts get at least so many tokens of every step: reading the weights takes as long as multiplying with them."""
FIRST_TOKENS = 128
"""Tokens of a step before any was measured."""
WAITING_STEPS = 8
"""Prompts that wait get longer steps rather than more than so many, up to the target."""
MANY = 16
"""With more requests than so many alive, every step with prompts in it takes the target."""
ALONE = 3
"""How many times the target a request may take that is alone: nobody waits for it, but somebody may come."""


def build(setup: Setup) -> Feature | None:
    """Return the clamp to the target, or None when there is none or prompts may not be cut."""
    target_ms = setup.scheduler.step_target_ms
    if target_ms <= 0 or not setup.scheduler.enable_chunked_prefill:
        return None

    def clamp(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        num_taken = state.limits.max_batched - budget
        num_behind = num_taken + (wanted if request.status is Status.RUNNING else 0)
        return max(0, min(wanted, _tokens_now(state, num_behind, target_ms) - num_taken))

    return Feature("step_time", clamp=clamp)


def _tokens_now(state: SchedulerState, num_behind: int, target_ms: int) -> int:
    """Return how many tokens this step may have: those in it, ``num_behind`` with the one who asks, and the queue's count."""
    most = most_tokens(state, target_ms)
    if len(state.live) == 1 or len(state.live) > MANY:
        return most
    for request in state.waiting:
        if num_behind >= most * WAITING_STEPS:
            return most
        num_behind += request.length
    least = max(most * 2 // 3, len(state.running) + LEAST_TOKENS)
    return min(most, max(least, num_behind // WAITING_STEPS))


def most_tokens(state: SchedulerState, target_ms: int) -> int:
    """Return how many tokens a step may have when many wait, all rows together; with a target of 0, what the budget allows."""
    if target_ms <= 0:
        return state.limits.max_batched
    num_tokens = state.pace.tokens_in(target_ms * 1_000_000)
    if num_tokens is None:
        num_tokens = FIRST_TOKENS
    if len(state.live) == 1:
        num_tokens *= ALONE
    return max(num_tokens, len(state.running) + LEAST_TOKENS)
