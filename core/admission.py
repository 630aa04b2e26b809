"""Admission: validate `Admit` against the server's limits and build requests. Also revalidates when the limits change."""

from __future__ import annotations

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefix import salt_digest
from quintet.core.policy import Policy
from quintet.core.requests.request import Delivery, Repetition, Request
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders
from quintet.wire.codec import unpack_i32
from quintet.wire.config import SchedulerConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.kv_spec import KvSpec
from quintet.wire.messages import Admit, FinishReason
from quintet.wire.params import SamplingParams, seed_of_choice
from quintet.wire.request import check_length


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
    check_fits(len(prompt), limits)
    stops, start = _stops_of(params, eos_token_ids), salt_digest(spec.cache_salt)
    seed = admit.request_id if params.seed is None else params.seed
    limit = length_limit(len(prompt), params.max_tokens, limits)
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
                    spec.attempt,
                    len(outputs),
                    origin=None if spec.resume_token is None else admit,
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


def length_limit(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """Return the maximum number of tokens of the request, prompt included."""
    longest = limits.max_request_len
    return longest if max_tokens is None else min(longest, num_prompt + max_tokens)


def check_fits(num_prompt: int, limits: Limits) -> None:
    """Raise `RequestError` unless the server can compute the prompt and one output token of a request that runs alone."""
    if num_prompt == 0:
        raise RequestError(
            ErrorCode.INVALID,
            "The prompt has 0 tokens; it must have at least 1. Send a non-empty prompt.",
            "prompt",
        )
    check_length(num_prompt, limits.max_model_len)
    cause = f" with the server's {limits.num_blocks} KV blocks of {limits.block_size} tokens (raise --kv-cache-memory)"
    check_length(num_prompt, limits.max_request_len, cause=cause)
    if limits.max_prompt is not None:
        cause = " without chunked prefill (enable it, or raise --max-num-batched-tokens)"
        check_length(num_prompt, limits.max_prompt + 1, cause=cause)


def resolve_limits(
    config: SchedulerConfig,
    *,
    kv: KvSpec,
    num_blocks: int,
    max_num_seqs: int,
    max_model_len: int,
    prefix_caching: bool,
    swap_bytes_per_s: int,
    num_parts: int = 1,
) -> Limits:
    """Return the limits on which the configuration and the executor's capacity agree."""
    step_tokens, part_bytes = config.max_num_batched_tokens, kv.bytes_per_block
    return Limits(
        num_blocks=num_blocks,
        block_size=kv.block_size,
        num_slots=max_num_seqs,
        max_running=min(max_num_seqs, config.max_num_seqs, config.max_num_batched_tokens),
        max_model_len=max_model_len,
        max_batched=config.max_num_batched_tokens,
        watermark=num_blocks // 100,
        max_prompt=None if config.enable_chunked_prefill else config.max_num_batched_tokens,
        prefix_caching=prefix_caching,
        audit=config.audit,
        block_bytes=part_bytes * num_parts,
        block_copy_ns=part_bytes * 1_000_000_000 // swap_bytes_per_s if swap_bytes_per_s else 0,
        groups=Groups(kv, step_tokens),
        stages=config.stages,
        max_request_len=kv.longest(num_blocks, max_model_len, step_tokens),
    )


def apply_limits(state: SchedulerState, now_ns: int) -> StepMessages:
    """Check every live request against new limits; end those that no longer fit with an error."""
    outbox = TokensBuilders()
    for request in list(state.waiting):
        request.kv.digests.clear()
        request.limit = length_limit(request.num_prompt, request.spec.params.max_tokens, state.limits)
        request.plan_until = request.limit
        state.num_reserved += state.limits.taken_by(request.limit)
        state.claim(request)
        try:
            check_fits(request.num_prompt, state.limits)
            fits = len(request.tokens) < request.limit
        except RequestError:
            fits = False
        if not fits:
            outbox.end(request, FinishReason.ERROR, now_ns)
            state.retire(request)
    return outbox.effects(state.step, now_ns)
