"""Deadline admission: reject requests that are late or predicted to be late.

The frontend reports the rejection to the client. Reads no clock. The prediction adds up the work before a request:
slots in use and queued prompts. Both proceed at the same time at measured speeds (`quintet.core.throughput`), so the
slower one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from quintet.core.features.latency_target import most_tokens
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState, by_rank
from quintet.wire.config import SchedulerConfig
from quintet.wire.errors import ErrorCode, RequestError

S = 1e-9
MAX_RETRY_S = 60
_WAIT_SLACK, _SERVICE_SLACK = 1.5, 1.1
"""Safety factors on predictions: a request admitted to end just in time would be late every second time.

A queue's time is less certain than a service time, and a shorter queue leaves no slot empty.
"""


@dataclass(slots=True, frozen=True)
class Forecast:
    """Prediction for a request that has not entered."""

    num_ahead: int
    """Requests queued before it."""
    first_token_ns: int
    """Time from now to its first token."""
    end_ns: int
    """Time from now to its earliest end, counting only outputs that it certainly gets."""


def check_deadline(state: SchedulerState, request: Request, now_ns: int) -> None:
    """Raise `RequestError` when the deadline of a new request has passed."""
    if now_ns >= request.spec.deadline_ns:
        state.counters.expired += request.spec.params.n
        raise RequestError(
            ErrorCode.DEADLINE,
            f"The request arrived {(now_ns - request.spec.deadline_ns) * S:.3g} s after its deadline. Send a later deadline.",
        )


def check_feasible(state: SchedulerState, config: SchedulerConfig, request: Request, now_ns: int) -> None:
    """Raise `RequestError` when a new request is predicted to miss its deadline.

    Never rejects when no other request is active, or before a step was measured: a wrong measurement would never be
    corrected.
    """
    if not config.deadline_admission or not state.live or not state.throughput.step_ns:
        return
    given_ns = request.spec.deadline_ns - now_ns
    forecast = predict(state, config, request)
    service_ns = forecast.end_ns - forecast.first_token_ns
    late_ns = int(forecast.first_token_ns * _WAIT_SLACK + service_ns * _SERVICE_SLACK) - given_ns
    if late_ns > 0:
        state.counters.deadline_rejections += 1
        raise RequestError(
            ErrorCode.OVERLOADED,
            f"The request would miss its deadline: {given_ns * S:.3g} s are left; {forecast.num_ahead} requests are "
            f"queued before it. Its first token is expected in {forecast.first_token_ns * S:.3g} s and its end in "
            f"{forecast.end_ns * S:.3g} s at the earliest. Retry later, or send a later deadline.",
            retry_s=max(1, min(MAX_RETRY_S, math.ceil(late_ns * S))),
        )


def predict(state: SchedulerState, config: SchedulerConfig, request: Request) -> Forecast:
    """Predict the times of a request of this rank, if it entered the queue now."""
    throughput = state.throughput
    step_ns = throughput.step_ns.value
    decode_ns = throughput.decode_ns.value if throughput.decode_ns else step_ns
    share = throughput.computed_share.value if throughput.computed_share else 1.0
    ahead = state.waiting[: bisect_left(state.waiting, request.rank, key=by_rank)]
    per_step = max(
        1, min(state.limits.max_batched, most_tokens(state, config.step_target_ms)) - len(state.running)
    )

    def prompts_ns(num_tokens: float) -> float:
        return num_tokens * throughput.token_ns.value + math.ceil(num_tokens / per_step) * decode_ns

    num_prefilling = sum(r.length - r.planned for r in state.running if r.length - r.planned > 1)
    num_waiting = share * sum(r.length for r in ahead if r.parent is None)
    for_slot_ns = _steps_until_slot(state, request, ahead) * step_ns
    wait_ns = max(for_slot_ns, prompts_ns(num_prefilling + num_waiting)) + len(state.in_flight) * step_ns
    first_ns = wait_ns + prompts_ns(max(1.0, share * request.length))
    end_ns = first_ns + throughput.num_steps(num_certain_outputs(request) - 1) * step_ns
    return Forecast(len(ahead), int(first_ns), int(end_ns))


def _steps_until_slot(state: SchedulerState, request: Request, ahead: list[Request]) -> int:
    """Return the number of steps until enough requests have ended for this one to enter.

    A request is expected to run as long as the mean; one that has run longer, to end in the next step.
    """
    limits, running = state.limits, state.running
    stay = state.throughput.outputs.value if state.throughput.outputs else 1.0
    num_before = len(running) + len(ahead)
    num_tokens = sum(r.length for r in running) + sum(r.length for r in ahead) + request.length
    mean_tokens = num_tokens / (num_before + 1) + stay / 2
    fits = int(limits.num_blocks * limits.block_size / limits.groups.taken_by(mean_tokens))
    num_slots = max(1, len(running), min(limits.max_running, fits))
    num_leaving = num_before + 1 - num_slots
    if num_leaving <= 0:
        return 0
    left = [max(1, _outputs_of(r, stay) - r.num_outputs) for r in running]
    left += [_outputs_of(r, stay) for r in ahead[: num_slots - len(running)]]
    left.sort()
    rounds, place = divmod(num_leaving - 1, len(left))
    return int(state.throughput.num_steps(left[place] + rounds * stay))


def _outputs_of(request: Request, stay: float) -> int:
    return max(num_certain_outputs(request), min(request.limit - request.num_prompt, math.ceil(stay)))


def num_certain_outputs(request: Request) -> int:
    """Return the minimum number of outputs of the request."""
    if not request.stops and not request.spec.params.stop:
        return request.limit - request.num_prompt
    return max(1, request.spec.params.min_tokens)
