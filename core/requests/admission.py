"""Admission of a request: build and queue one `Request` per choice, unless it continues, is rejected or has ended."""

from __future__ import annotations

from dataclasses import dataclass

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
from quintet.wire.params import SamplingParams, seed_of_choice
from quintet.wire.request import RequestSpec, check_length


@dataclass(slots=True)
class AdmissionContext:
    """State of the engine that admission reads and changes."""

    eos_token_ids: list[int]
    scheduler: SchedulerConfig
    retained: RetainedRequests
    rejections: Rejections
    deadlines: DeadlineHeap[Request]
    num_arrived: int = 0
    """Number of choices so far; numbers the next ones."""


def admit(context: AdmissionContext, state: SchedulerState, message: Admit, now_ns: int) -> StepMessages:
    """Queue a request, one entry per choice, or answer it at once.

    The order matters: a message of a lost frontend must not end a live attempt, and only a request that is new may be
    rejected.
    """
    spec, outbox = message.spec, TokensBuilders()
    ids = range(message.request_id, message.request_id + spec.params.n)
    if any(state.has_seen(request_id, spec.attempt) for request_id in ids):
        return StepMessages()  # a duplicate, or older than a known attempt
    earlier = [state.live[request_id] for request_id in ids if spec.attempt and request_id in state.live]
    if len(earlier) == len(ids) and all(can_resume(request, message) for request in earlier):
        for request in earlier:
            _continue(request, spec, outbox, now_ns)
        return outbox.effects(state.step, now_ns)
    for request in earlier:
        outbox.close(request)
        request.delivery.origin = None  # only the newer attempt may be retained
        state.retire(request)
    for request_id in ids if spec.attempt else ():
        context.retained.take(request_id)
    try:
        _admit_new(context, state, message, outbox, now_ns, is_known=bool(earlier))
    except RequestError as error:
        outbox.failed.append(
            Failed(message.request_id, error.code, error.message, error.param, error.retry_s)
        )
    return outbox.effects(state.step, now_ns)


def _continue(request: Request, spec: RequestSpec, outbox: TokensBuilders, now_ns: int) -> None:
    """Continue a live choice under a newer attempt."""
    delivery, was_opened = request.delivery, request.delivery.opened
    delivery.attempt, delivery.num_seen = spec.attempt, spec.num_seen
    outbox.close(request)
    request.detokenizer = spec.detokenizer
    if was_opened:
        outbox.builder_for(request, now_ns)


def _admit_new(
    context: AdmissionContext,
    state: SchedulerState,
    message: Admit,
    outbox: TokensBuilders,
    now_ns: int,
    *,
    is_known: bool,
) -> None:
    """Queue each choice, or end it at once if its last output is already known.

    is_known: an earlier attempt was alive, so the request must not be rejected as poison. Raises `RequestError`.
    """
    spec, num_seen = message.spec, message.spec.num_seen
    if context.rejections.entries and not is_known:
        rejection = context.rejections.answer_to(message, now_ns)
        if rejection is not None:
            state.counters.poison_rejections += 1
            outbox.failed.append(rejection)
            return
    if spec.resumes:
        # From all its outputs, or with log-probabilities from those that the client has.
        kept = context.retained.take(message.request_id)
        if spec.params.logprobs is None and kept.startswith(spec.output_ids):
            spec.output_ids = kept
    policy, num_unreserved = POLICIES[context.scheduler.policy], state.num_unreserved
    requests = make_requests(
        message, context.num_arrived, policy, context.eos_token_ids, state.limits, num_unreserved
    )
    if spec.deadline_ns:
        check_deadline(state, requests[0], now_ns)
        if not spec.attempt and not spec.resumes:
            check_feasible(state, context.scheduler, requests[0], now_ns)
    context.num_arrived += len(requests)
    for request in requests:
        request.delivery.num_seen = num_seen
        ending = ending_of(request)
        if ending is None:
            state.add(request)
            if spec.deadline_ns:
                context.deadlines.watch(spec.deadline_ns, request)
            continue
        outbox.end_with_last(request, ending, now_ns)
        state.note_ended(request)
        context.retained.add(request, now_ns)


def _stops_of(params: SamplingParams, eos_token_ids: list[int]) -> dict[int, bool]:
    stops = {} if params.ignore_eos else dict.fromkeys(eos_token_ids, False)
    for token in params.stop_token_ids:
        stops.setdefault(token, True)
    return stops


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
    stops, start = _stops_of(params, eos_token_ids), salt_digest(spec.cache_salt, spec.adapter)
    seed = admit.request_id if params.seed is None else params.seed
    limit = length_limit(len(prompt), spec, limits)
    taken, watched = limits.taken_by(limit), params.repetition_detection
    requests: list[Request] = []
    for choice in range(params.n):
        requests.append(
            Request(
                request_id=admit.request_id + choice,
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
                choice=spec.choice + choice,
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
