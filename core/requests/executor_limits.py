"""Limits of a new executor, and the check of the live requests against them."""

from __future__ import annotations

import msgspec

from quintet.core.kv.groups import Groups
from quintet.core.requests.admission import check_fits, length_limit
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig
from quintet.wire.errors import RequestError
from quintet.wire.messages import FinishReason
from quintet.wire.step import Capacity


def resolve_limits(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, capacity: Capacity
) -> Limits:
    """Return the limits on which the configuration and the executor's capacity agree."""
    kv = msgspec.structs.replace(model.kv, block_size=capacity.block_size)
    max_model_len = min(capacity.max_model_len, model.max_model_len)
    step_tokens, part_bytes = scheduler.max_num_batched_tokens, kv.offloaded_bytes_per_block
    copy_speed = capacity.swap_bytes_per_s
    return Limits(
        num_blocks=capacity.num_blocks,
        block_size=kv.block_size,
        num_slots=capacity.max_num_seqs,
        max_running=min(capacity.max_num_seqs, scheduler.max_num_seqs, step_tokens),
        max_model_len=max_model_len,
        max_batched=step_tokens,
        watermark=capacity.num_blocks // 100,
        max_prompt=None if scheduler.enable_chunked_prefill else step_tokens,
        prefix_caching=cache.enable_prefix_caching,
        audit=scheduler.audit,
        block_bytes=part_bytes * cache.num_parts,
        block_copy_ns=part_bytes * 1_000_000_000 // copy_speed if copy_speed else 0,
        groups=Groups(kv, step_tokens),
        stages=scheduler.stages,
        max_request_len=kv.longest(capacity.num_blocks, max_model_len, step_tokens),
    )


def apply_limits(state: SchedulerState, now_ns: int) -> StepMessages:
    """Check every live request against new limits; end those that no longer fit with an error."""
    outbox = TokensBuilders()
    for request in list(state.waiting):
        request.kv.digests.clear()
        request.limit = length_limit(request.num_prompt, request.spec, state.limits)
        request.plan_until = request.limit
        state.num_reserved += state.limits.taken_by(request.limit)
        state.claim(request)
        try:
            check_fits(request.num_prompt, state.limits, request.spec)
            fits = len(request.tokens) < request.limit
        except RequestError:
            fits = False
        if not fits:
            outbox.end(request, FinishReason.ERROR, now_ns)
            state.retire(request)
    return outbox.effects(state.step, now_ns)
