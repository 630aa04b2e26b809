"""Speculative decoding: allow decode rows to verify draft tokens.

The executor chooses the drafts and computes them in the same step as the newest token, so it draws after each of
them. A draft is accepted if it equals the token drawn at its position. Outputs are therefore the same without drafts.

The number of accepted drafts is known when the result arrives. Until then ``length`` and ``planned`` of a request are
lower bounds, and ``num_unverified_drafts`` is the number of drafts in flight: the largest error of both. Drafts only use blocks
that the request has, or that are free.

With recurrent states, the executor keeps the state after the accepted drafts. No draft passes a state checkpoint: the
scheduler waits there until the request's length is known (`quintet.core.scheduler._decode`).
"""

from __future__ import annotations

from functools import partial

from quintet.core import block_manager
from quintet.core.hooks import Feature, Setup
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.step_builder import StepBuilder


def build(setup: Setup) -> Feature | None:
    config = setup.scheduler.speculative
    if config is None:
        return None
    return Feature("drafts", attach=partial(attach, config.num_speculative_tokens))


def attach(most: int, state: SchedulerState, step: StepBuilder) -> None:
    """Attach the number of drafts that each row may verify: at most ``most``, within the request's limit and its blocks."""
    drafts = bytearray(len(step.rows))
    for row, (request, is_sampled, count) in enumerate(
        zip(step.rows, step.samples, step.counts, strict=True)
    ):
        if count != 1 or not is_sampled:
            continue
        num_drafts = min(most, request.plan_until - request.length)
        if request.num_covered - request.planned < num_drafts:
            block_manager.extend_early(state, step, request, num_drafts)
            num_drafts = min(num_drafts, request.num_covered - request.planned)
        request.num_unverified_drafts += num_drafts
        request.num_covered -= num_drafts
        request.plan_until -= num_drafts
        drafts[row] = 1 + num_drafts
    step.columns["drafts"] = bytes(drafts)


def return_drafts(state: SchedulerState, flight: InFlightPlan) -> None:
    """Correct the requests and the ends of a step for which the executor proposed no drafts."""
    for row, (request, generation, allowed) in enumerate(
        zip(flight.rows, flight.generations, flight.drafts, strict=True)
    ):
        if allowed and request.generation == generation:
            request.num_unverified_drafts -= allowed - 1
            request.num_covered += allowed - 1
            request.plan_until += allowed - 1
            flight.ends[row] = len(request.tokens)
    if 1 in flight.samples:
        state.throughput.tokens_per_draw.note(1.0)
