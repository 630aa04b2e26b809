"""Just in time: prompts begin as late as they can without the batch ending later.

For whole batches, where only the last token's time matters (``scheduling_policy`` longest). A step that only decodes
streams all weights for a few tokens; a step that also carries a piece of a prompt streams them no more often. So prompts
are spread over the steps that there will be anyway: as many as the request with the most outputs to go still needs. A
prompt with fewer outputs to go has the difference as slack, and a step computes as much as keeps every prompt within
its slack. When all want the same number of outputs there is no slack, and prompts come as fast as the budget allows.

``limit`` is all that is known of a request's end. One that stops earlier takes its slack from the others, which are then
computed faster, from the next step on.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.request import Request
from quintet.core.state import State

LEAST_TOKENS = 64
"""Prompts get at least so many tokens of every step: below, it is the weights that a step waits for, not the tokens."""


def build(setup: Setup) -> Feature | None:
    """On where the policy is to finish a batch soonest, and prompts may be cut."""
    scheduler = setup.scheduler
    is_on = scheduler.policy == "longest" and scheduler.enable_chunked_prefill
    return Feature("just_in_time", clamp=clamp) if is_on else None


def clamp(state: State, request: Request, wanted: int, budget: int) -> int:
    """Give the request what is left of the prompt tokens that this step needs."""
    num_steps = request.limit - request.length  # from this one on, until all have ended
    num_decoding = 0
    for other in state.running:
        draws_now = other.length - other.planned <= 1
        num_steps = max(num_steps, other.limit - other.length + draws_now)
        num_decoding += other.planned > other.num_prompt
    num_taken = max(0, state.limits.max_batched - budget - num_decoding)
    needed, total, most = LEAST_TOKENS, num_taken, num_taken + budget
    for queue in (state.running, state.waiting):
        for other in queue:
            behind = other.length - other.planned
            if behind > 1:
                total += behind
                num_left = (
                    num_steps - (other.limit - other.length) + 1
                )  # steps in which to be complete, this one too
                needed = max(needed, -(-total // max(1, num_left)))
                if needed >= most:
                    return wanted
    return max(0, min(wanted, needed - num_taken))
