"""Until when requests must have ended: which are too late, and which will be.

The core's half of deadlines; the frontend's tells the client. Reads no clock. To predict is to ask what stands before
a request: slots that others hold, prompts that come first. Each has its pace (`quintet.core.throughput`), and the slower one
decides; they are worked off at the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from quintet.core.features.latency_target import most_tokens
from quintet.core.request import Request
from quintet.core.scheduler_state import SchedulerState, by_rank
from quintet.wire.config import SchedulerConfig
from quintet.wire.errors import ErrorCode, RequestError

S = 1e-9
MAX_RETRY_S = 60
_WAIT_SLACK, _SERVICE_SLACK = 1.5, 1.1
"""What was predicted is taken for so many times itself: who is admitted to end just in time would be late every other
time, having cost as much as one that is not. How long a queue takes is less certain than how long an answer does, and
while there is a queue at all, a shorter one leaves no slot empty."""


@dataclass(slots=True, frozen=True)
class Forecast:
    """What is expected of a request that has not entered."""

    num_ahead: int
    """Requests that wait before it."""
    first_token_ns: int
    """From now to its first token."""
    end_ns: int
    """From now to the earliest end it can have: of outputs, only those that it is sure to get are counted."""


def check_in_time(state: SchedulerState, request: Request, now_ns: int) -> None:
    """Raise `RequestError` when the deadline of a request that just came has passed."""
    if request.deadline_ns and now_ns >= request.deadline_ns:
        state.counters.expired += 1
        raise RequestError(
            ErrorCode.DEADLINE,
            f"The request came {(now_ns - request.deadline_ns) * S:.3g} s after its deadline. Allow more time.",
        )


def check_hopeful(state: SchedulerState, config: SchedulerConfig, request: Request, now_ns: int) -> None:
    """Raise `RequestError` when the request, which is not in the queue yet, will certainly miss its deadline.

    Who is alone is never refused, nor anybody before a step was measured: a wrong measurement would never be corrected.
    """
    is_asked = request.deadline_ns and config.deadline_admission
    if not is_asked or not state.live or not state.pace.step_ns:
        return
    given_ns = request.deadline_ns - now_ns
    forecast = predict(state, config, request)
    service_ns = forecast.end_ns - forecast.first_token_ns
    late_ns = int(forecast.first_token_ns * _WAIT_SLACK + service_ns * _SERVICE_SLACK) - given_ns
    if late_ns > 0:
        state.counters.hopeless += 1
        raise RequestError(
            ErrorCode.OVERLOADED,
            f"The request would miss its deadline: {given_ns * S:.3g} s are left; {forecast.num_ahead} requests wait "
            f"before it, so that its first token is expected in {forecast.first_token_ns * S:.3g} s and its end in "
            f"{forecast.end_ns * S:.3g} s at the earliest. Try again later, or allow more time.",
            retry_s=max(1, min(MAX_RETRY_S, math.ceil(late_ns * S))),
        )


def predict(state: SchedulerState, config: SchedulerConfig, request: Request) -> Forecast:
    """Predict when a request of this rank would get its first token, if it came into the queue now."""
    pace = state.pace
    step_ns = pace.step_ns.value
    decode_ns = pace.decode_ns.value if pace.decode_ns else step_ns
    share = pace.computed_share.value if pace.computed_share else 1.0
    ahead = state.waiting[: bisect_left(state.waiting, request.rank, key=by_rank)]
    per_step = max(
        1, min(state.limits.max_batched, most_tokens(state, config.step_target_ms)) - len(state.running)
    )

    def prompts_ns(num_tokens: float) -> float:
        return num_tokens * pace.token_ns.value + math.ceil(num_tokens / per_step) * decode_ns

    num_begun = sum(r.length - r.planned for r in state.running if r.length - r.planned > 1)
    num_waiting = share * sum(r.length for r in ahead if r.parent is None)
    for_slot_ns = _steps_until_slot(state, request, ahead) * step_ns
    wait_ns = max(for_slot_ns, prompts_ns(num_begun + num_waiting)) + len(state.in_flight) * step_ns
    first_ns = wait_ns + prompts_ns(max(1.0, share * request.length))
    end_ns = first_ns + (num_certain_outputs(request) - 1) * step_ns
    return Forecast(len(ahead), int(first_ns), int(end_ns))


def _steps_until_slot(state: SchedulerState, request: Request, ahead: list[Request]) -> int:
    """Return the steps until as many requests have ended as must for this one to enter.

    Who stays is expected to stay as long as others did; who stayed longer, to leave in the next step.
    """
    limits, running = state.limits, state.running
    stay = state.pace.outputs.value if state.pace.outputs else 1.0
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
    return int(left[place] + rounds * stay)


def _outputs_of(request: Request, stay: float) -> int:
    return max(num_certain_outputs(request), min(request.limit - request.num_prompt, math.ceil(stay)))


def num_certain_outputs(request: Request) -> int:
    """Return how many outputs the request will have at the least."""
    if not request.stops and not request.params.stop:
        return request.limit - request.num_prompt
    return max(1, request.params.min_tokens)
