"""Prefill pacing: delay prompts as far as possible without making the batch end later.

For offline batches (``scheduling_policy`` longest), where only the time of the last token matters. A decode-only step
reads all weights for few tokens; a prefill chunk in it costs no extra read. So prompts are spread over the steps that
are needed anyway: as many as the request with the most remaining outputs needs. A request with fewer remaining
outputs has slack, and a step computes enough to keep every prompt within its slack. With equal output lengths there
is no slack, and the budget alone decides.

Requests that end together also hold memory together. If KV memory cannot hold all at full length, the budget alone
decides, so that some end before others start.

``limit`` is the only estimate of a request's end. A request that stops early removes slack, and later steps compute
more.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState

MIN_TOKENS = 64
"""Minimum prompt tokens per step: below it, a step is bound by reading weights."""


def build(setup: Setup) -> Feature | None:
    scheduler = setup.scheduler
    is_on = scheduler.policy == "longest" and scheduler.enable_chunked_prefill
    return Feature("prefill_pacing", limit_tokens=PacedChunks().limit_tokens) if is_on else None


@dataclass(slots=True)
class PacedChunks:
    """Caches, within a step, the part of the budget that prompts leave unused.

    Computing it per prompt would take quadratic time.
    """

    _step: int | None = None
    _unused_budget: int = 0

    def limit_tokens(self, state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        """Grant the request its part of the prompt tokens that this step needs."""
        if state.step != self._step:
            self._step = state.step
            self._unused_budget = max(0, budget - num_needed(state, budget))
        return max(0, min(wanted, budget - self._unused_budget))


def num_needed(state: SchedulerState, budget: int) -> int:
    """Return the number of prompt tokens that a step must compute; called when it only has decode rows."""
    if state.num_unreserved < 0:
        return budget
    num_steps = 0  # from this one until all have ended
    for request in state.running:
        draws_now = request.length - request.planned <= 1
        num_steps = max(num_steps, request.limit - request.length + draws_now)
    for request in state.waiting:
        num_steps = max(num_steps, request.limit - request.length)
    needed, total = MIN_TOKENS, 0
    for queue in (state.running, state.waiting):
        for request in queue:
            num_uncomputed = request.length - request.planned
            if num_uncomputed > 1:
                total += num_uncomputed
                num_left = (
                    num_steps - (request.limit - request.length) + 1
                )  # steps left to complete it, including this one
                needed = max(needed, -(-total // num_left))
                if needed >= budget:
                    return budget
    return needed
