"""Chunked prefill: limit the prompt tokens of one step.

On (default), a prompt takes the budget that decode leaves, or the long-prompt threshold while other requests are
alive. Off, a prompt is computed in one step or waits for a step with enough budget.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, LimitTokens, Setup
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    if not setup.scheduler.enable_chunked_prefill:
        return Feature("chunked_prefill", limit_tokens=whole_or_wait)
    threshold = setup.scheduler.long_prefill_token_threshold
    if threshold > 0:
        return Feature("chunked_prefill", limit_tokens=share_of(threshold))
    return None


def whole_or_wait(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
    """Compute all wanted tokens or none.

    Admission rejects prompts that exceed a step. A preempted request may exceed it with its outputs; it is split into
    chunks.
    """
    in_pieces = request.status is Status.RUNNING or wanted > state.limits.max_batched
    return wanted if wanted <= budget or in_pieces else 0


def share_of(threshold: int) -> LimitTokens:
    """Return a limit of ``threshold`` tokens while more than one request is alive."""

    def limit_tokens(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        return min(wanted, threshold) if len(state.live) > 1 else wanted

    return limit_tokens
