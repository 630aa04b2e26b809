"""Admission of a request: an ordered tuple of steps, which build one `Request` per choice.

Each step answers the request, which ends its admission, or passes it on by returning None. The order matters: a
message of a lost frontend must not end a live attempt, and only a request that is new may be rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quintet.core.kv.prefix import salt_digest
from quintet.core.poison_isolation import Rejections
from quintet.core.policy import POLICIES, Policy
from quintet.core.requests.deadlines import check_deadline, check_feasible
from quintet.core.requests.repetition import Repetition
from quintet.core.requests.request import Delivery, Request
from quintet.core.requests.resumption import RetainedRequests, can_resume
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders, ending_of
from quintet.process.deadlines import DeadlineHeap
from quintet.wire.codec import unpack_i32
from quintet.wire.config import SchedulerConfig
from quintet.wire.errors import RequestError, invalid
from quintet.wire.messages import Admit, Failed
from quintet.wire.params import seed_of_choice
from quintet.wire.request import RequestSpec, check_length


@dataclass(slots=True)
class AdmissionContext:
    """State of the engine that the steps read and change."""

    eos_token_ids: list[int]
    scheduler: SchedulerConfig
    retained: RetainedRequests
    rejections: Rejections
    deadlines: DeadlineHeap[Request]
    num_arrived: int = 0
    """Number of choices so far; numbers the next ones."""


class Arrival(msgspec.Struct):
    """An `Admit` message on its way through the steps."""

    message: Admit
    state: SchedulerState
    now_ns: int
    num_seen: int
    """Outputs that the frontend has."""
    is_known: bool = False
    """An earlier attempt was alive or is retained: the request was admitted before and must not be rejected now."""
    requests: list[Request] = []
    """One request per choice, once built."""
    outbox: TokensBuilders = msgspec.field(default_factory=TokensBuilders)

    @property
    def ids(self) -> range:
        first = self.message.request_id
        return range(first, first + self.message.spec.params.n)

    def messages(self) -> StepMessages:
        return self.outbox.effects(self.state.step, self.now_ns)


def drop_duplicate(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Drop an attempt that is already known, or older than a known one."""
    attempt, state = arrival.message.spec.attempt, arrival.state
    for request_id in arrival.ids:
        if state.has_seen(request_id, attempt):
            return StepMessages()
    return None


def resume_live(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Continue live choices under a newer attempt where `can_resume` allows it; otherwise end the earlier attempt."""
    spec, state, outbox = arrival.message.spec, arrival.state, arrival.outbox
    if not spec.attempt:
        return None
    earlier = [state.live[request_id] for request_id in arrival.ids if request_id in state.live]
    if len(earlier) == len(arrival.ids) and all(can_resume(request, arrival.message) for request in earlier):
        for request in earlier:
            delivery, was_opened = request.delivery, request.delivery.opened
            delivery.attempt, delivery.num_seen = spec.attempt, arrival.num_seen
            outbox.close(request)
            request.detokenizer = spec.detokenizer
            if was_opened:
                outbox.builder_for(request, arrival.now_ns)
        return arrival.messages()
    for request in earlier:
        outbox.close(request)
        request.delivery.origin = None  # only the newer attempt may be retained
        state.retire(request)
    for request_id in arrival.ids:
        context.retained.take(request_id)
    arrival.is_known = bool(earlier)
    return None


def reject_known_poison(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Reject a new request that has made the executor fail before."""
    if arrival.is_known or not context.rejections.entries:
        return None
    rejection = context.rejections.answer_to(arrival.message, arrival.now_ns)
    if rejection is None:
        return None
    arrival.state.counters.poison_rejections += 1
    arrival.outbox.failed.append(rejection)
    return arrival.messages()


def resume_retained(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Continue a retained request from all its outputs, or with log-probabilities from those that the client has."""
    spec = arrival.message.spec
    if spec.resumes:
        kept, seen = context.retained.take(arrival.message.request_id), spec.output_ids
        if spec.params.logprobs is None and kept.startswith(seen):
            spec.output_ids = kept
    return None


def build_requests(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Build one request per choice. Raises `RequestError` when the server can never compute it."""
    state = arrival.state
    arrival.requests = make_requests(
        arrival.message,
        context.num_arrived,
        POLICIES[context.scheduler.policy],
        context.eos_token_ids,
        state.limits,
        state.num_unreserved,
    )
    for request in arrival.requests:
        request.delivery.num_seen = arrival.num_seen
    return None


def check_deadlines(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Raise `RequestError` when the request is late, or new and predicted to be late."""
    spec, request = arrival.message.spec, arrival.requests[0]
    if not spec.deadline_ns:
        return None
    check_deadline(arrival.state, request, arrival.now_ns)
    if not spec.attempt and not spec.resumes:
        check_feasible(arrival.state, context.scheduler, request, arrival.now_ns)
    return None


def queue(context: AdmissionContext, arrival: Arrival) -> StepMessages | None:
    """Queue each choice, or end it at once if its last output is already known."""
    state, now_ns = arrival.state, arrival.now_ns
    context.num_arrived += len(arrival.requests)
    for request in arrival.requests:
        ending = ending_of(request)
        if ending is None:
            state.add(request)
            if request.spec.deadline_ns:
                context.deadlines.watch(request.spec.deadline_ns, request)
            continue
        arrival.outbox.end_with_last(request, ending, now_ns)
        state.note_ended(request)
        context.retained.add(request, now_ns)
    return arrival.messages()


AdmissionStep = Callable[[AdmissionContext, Arrival], StepMessages | None]

ADMISSION_STEPS: tuple[AdmissionStep, ...] = (
    drop_duplicate,
    resume_live,
    reject_known_poison,
    resume_retained,
    build_requests,
    check_deadlines,
    queue,
)


def admit(context: AdmissionContext, state: SchedulerState, message: Admit, now_ns: int) -> StepMessages:
    """Run the steps in order until one answers. A `RequestError` of a step is the answer."""
    arrival = Arrival(message, state, now_ns, message.spec.num_seen)
    try:
        for step in ADMISSION_STEPS:
            answer = step(context, arrival)
            if answer is not None:
                return answer
    except RequestError as error:
        arrival.outbox.failed.append(
            Failed(message.request_id, error.code, error.message, error.param, error.retry_s)
        )
    return arrival.messages()


def make_requests(
    admit: Admit,
    first_arrival: int,
    policy: Policy,
    eos_token_ids: list[int],
    limits: Limits,
    num_unreserved: int,
) -> list[Request]:
    """Return one waiting request per choice, without slots or blocks; arrivals are numbered from ``first_arrival``.

    ``num_unreserved`` is the number of KV tokens left when all live requests reach their limits.

    Raises `RequestError` when the request can never be served.
    """
    spec, params = admit.spec, admit.spec.params
    prompt = list(unpack_i32(admit.prompt_ids))
    outputs = list(unpack_i32(spec.output_ids))
    tokens = prompt + outputs
    check_fits(len(prompt), limits, spec)
    stops, start = params.end_tokens(eos_token_ids), salt_digest(spec.cache_salt, spec.adapter)
    seed = admit.request_id if params.seed is None else params.seed
    limit = length_limit(len(prompt), spec, limits)
    taken, watched = limits.taken_by(limit), params.repetition_detection
    requests: list[Request] = []
    for choice in range(params.n):
        requests.append(
            Request(
                request_id=admit.request_id + choice,
                first_id=admit.request_id - spec.choice,
                spec=spec,
                seed=seed_of_choice(seed, spec.choice + choice),
                num_prompt=len(prompt),
                stops=stops,
                rank=policy(
                    spec.priority,
                    first_arrival + choice,
                    limit - len(tokens) if (choice + 1) * taken <= num_unreserved else None,
                ),
                salt_digest=start,
                detokenizer=spec.detokenizer,
                delivery=Delivery(
                    spec.attempt, len(outputs), origin=None if spec.resume_token is None else admit
                ),
                tokens=tokens,
                limit=limit,
                plan_until=limit,
                length=len(tokens),
                bad_word_ids=admit.bad_word_ids,
                embeds=admit.embeds,
                parent=requests[0] if choice else None,
                repetition=None if watched is None else Repetition(watched),
            )
        )
    requests[0].stats.num_open = len(requests)
    return requests


def length_limit(num_prompt: int, spec: RequestSpec, limits: Limits) -> int:
    """Return the maximum number of tokens of the request, prompt included; a pooling request counts one, not drawn."""
    if spec.pooling is not None:
        return num_prompt + 1
    longest, max_tokens = limits.max_request_len, spec.params.max_tokens
    return longest if max_tokens is None else min(longest, num_prompt + max_tokens)


def check_fits(num_prompt: int, limits: Limits, spec: RequestSpec) -> None:
    """Raise `RequestError` unless the server can compute the prompt, and one output token, of a request that runs alone."""
    if num_prompt == 0:
        raise invalid("The prompt has 0 tokens; it must have at least 1. Send a non-empty prompt.", "prompt")
    least = 1 if spec.pooling is None else 0
    check_length(num_prompt, limits.max_model_len, max_tokens=least)
    cause = f" with the server's {limits.num_blocks} KV blocks of {limits.block_size} tokens (raise --kv-cache-memory)"
    check_length(num_prompt, limits.max_request_len, max_tokens=least, cause=cause)
    if limits.max_prompt is not None:
        cause = " without chunked prefill (enable it, or raise --max-num-batched-tokens)"
        check_length(num_prompt, limits.max_prompt + least, max_tokens=least, cause=cause)
