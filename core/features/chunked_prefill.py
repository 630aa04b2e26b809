"""Chunked prefill: how much of a long prompt one step computes.

On (the default), a prompt takes what the decoding requests leave of the step's budget, or the long-prompt share while
others are alive. Off, a prompt is computed whole or waits for a step with room.
"""

from __future__ import annotations

from quintet.core.hooks import Clamp, Feature, Setup
from quintet.core.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Return the clamp that the configuration asks for, or None when the budget alone decides."""
    if not setup.scheduler.enable_chunked_prefill:
        return Feature("chunked_prefill", clamp=whole_or_wait)
    threshold = setup.scheduler.long_prefill_token_threshold
    if threshold > 0:
        return Feature("chunked_prefill", clamp=share_of(threshold))
    return None


def whole_or_wait(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
    """Compute everything the request wants, or nothing.

    Prompts that no step could hold are refused at admission. A request that outgrew a step after its prompt, and was
    preempted, is the one that must come in pieces: it enters when it wants more than any step has, and then goes on.
    """
    in_pieces = request.status is Status.RUNNING or wanted > state.limits.max_batched
    return wanted if wanted <= budget or in_pieces else 0


def share_of(threshold: int) -> Clamp:
    """Return a clamp to ``threshold`` tokens while more than one request is alive."""

    def clamp(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        return min(wanted, threshold) if len(state.live) > 1 else wanted

    return clamp
