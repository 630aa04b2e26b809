"""Effects of poison isolation on the scheduler state: restrict running requests, end the culprit.

`quintet.core.poison_isolation.suspects` chooses the suspects.
"""

from __future__ import annotations

from quintet.core.poison_isolation.rejections import REJECTION_TTL_S, Rejections, fingerprint_of
from quintet.core.poison_isolation.suspects import DEATHS_ALONE, PoisonIsolation
from quintet.core.scheduler_state import SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Failed


def advance_trial(state: SchedulerState, suspects: PoisonIsolation) -> bool:
    """Start the next trial when the current one is over. Return True when a step may be planned now."""
    if not suspects.have_passed(state.live):
        return True
    if suspects.remain(state.live):
        if state.in_flight:
            return False  # steps in flight of other requests must not be blamed on the next suspects
        for request in list(state.running):
            state.preempt(request)
    suspects.advance(state.live)
    state.trial = suspects.trial
    return True


def cancel_trial(state: SchedulerState, suspects: PoisonIsolation) -> None:
    """End the trial: the suspects wait for something that is not on trial and would wait for them."""
    suspects.clear()
    state.trial = None


def reject_poison(
    state: SchedulerState,
    suspects: PoisonIsolation,
    rejections: Rejections,
    request_id: int,
    failure: str,
    now_ns: int,
) -> StepMessages:
    """End all choices of the culprit, and reject requests with the same fingerprint.

    ``failure`` is the executor's exception; empty when it died. Live requests with the same fingerprint end too,
    unless they were computed successfully before.
    """
    outbox = TokensBuilders()
    culprit = state.live.get(request_id)
    if culprit is None:
        return outbox.effects(state.step, now_ns)
    cause = failure or f"its process died {DEATHS_ALONE} times in a row while it computed nothing else"
    message = (
        f"This request made the executor fail: {cause}. Requests with this prompt and these parameters are rejected for "
        f"{REJECTION_TTL_S} s; change the prompt or the parameters."
    )
    key, first = fingerprint_of(culprit), culprit.first_id
    rejections.add(key, cause, now_ns)
    ended: set[int] = set()
    for request in list(state.live.values()):
        is_choice = request.first_id == first
        is_unproven = request.stats.scheduled_ns is None or suspects.is_suspect(request.request_id)
        if is_choice or (is_unproven and fingerprint_of(request) == key):
            ended.add(request.first_id)
            outbox.close(request)
            outbox.failed.append(
                Failed(request.request_id, ErrorCode.UNPROCESSABLE, message, retry_s=REJECTION_TTL_S)
            )
            request.delivery.origin = None  # not retained for its client
            state.retire(request)
    state.counters.poison_requests += len(ended)
    return outbox.effects(state.step, now_ns)
