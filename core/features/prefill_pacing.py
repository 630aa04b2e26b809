"""Just in time: prompts begin as late as they can without the batch ending later.

For whole batches, where only the last token's time matters (``scheduling_policy`` longest). A step that only decodes
streams all weights for a few tokens; a step that also carries a piece of a prompt streams them no more often. So prompts
are spread over the steps that there will be anyway: as many as the request with the most outputs to go still needs. A
prompt with fewer outputs to go has the difference as slack, and a step computes as much as keeps every prompt within
its slack. When all want the same number of outputs there is no slack, and prompts come as fast as the budget allows.

Whoever ends together is also in memory together. When KV memory would not hold everybody at full length, prompts come
as fast as the budget allows, so that some end before others begin.

``limit`` is all that is known of a request's end. One that stops earlier takes its slack from the others, which are then
computed faster, from the next step on.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.request import Request
from quintet.core.scheduler_state import SchedulerState

LEAST_TOKENS = 64
"""Prompts get at least so many tokens of every step: below, it is the weights that a step waits for, not the tokens."""


def build(setup: Setup) -> Feature | None:
    """On where the policy is to finish a batch soonest, and prompts may be cut."""
    scheduler = setup.scheduler
    is_on = scheduler.policy == "longest" and scheduler.enable_chunked_prefill
    return Feature("just_in_time", clamp=PacedChunks().clamp) if is_on else None


class PacedChunks:
    """Remembers, from the first prompt of a step to its last, how much of the budget they leave alone.

    A function of the state that is looked up once a step: for each prompt, it would take time that grows with the
    square of their number.
    """

    __slots__ = ("_left_alone", "_step")

    def __init__(self) -> None:
        self._step: int | None = None
        self._left_alone = 0

    def clamp(self, state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
        """Give the request what is left of the prompt tokens that this step needs."""
        if state.step != self._step:
            self._step = state.step
            self._left_alone = max(0, budget - num_needed(state, budget))
        return max(0, min(wanted, budget - self._left_alone))


def num_needed(state: SchedulerState, budget: int) -> int:
    """Return how many prompt tokens a step must compute, if it can; asked before it has any but decoding rows."""
    if state.num_unpromised < 0:
        return budget
    num_steps = 0  # from this one on, until all have ended
    for request in state.running:
        draws_now = request.length - request.planned <= 1
        num_steps = max(num_steps, request.limit - request.length + draws_now)
    for request in state.waiting:
        num_steps = max(num_steps, request.limit - request.length)
    needed, total = LEAST_TOKENS, 0
    for queue in (state.running, state.waiting):
        for request in queue:
            behind = request.length - request.planned
            if behind > 1:
                total += behind
                num_left = (
                    num_steps - (request.limit - request.length) + 1
                )  # steps to be complete in, this one too
                needed = max(needed, -(-total // num_left))
                if needed >= budget:
                    return budget
    return needed
