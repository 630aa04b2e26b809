"""Commit of a step's result: append tokens, register full blocks, end requests.

A request may lose its slot after the plan was made (stop, cancel, preemption). Its row then has an older generation,
and the result is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.core.commit_logprobs import forward_logprobs
from quintet.core.features.drafts import apply_accepted, return_drafts
from quintet.core.features.kv_connector import offer
from quintet.core.features.pooling import end_pooled
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders, ending_of
from quintet.wire.codec import unpack_i32
from quintet.wire.messages import FinishReason
from quintet.wire.step import StepResult


def commit(state: SchedulerState, result: StepResult, now_ns: int) -> StepMessages:
    """Apply the result of the oldest step in flight and return the messages to send."""
    flight = state.in_flight.popleft()
    state.counters.steps += 1
    state.pool.settle(flight.step)
    num_tokens = sum(flight.counts)
    state.throughput.note_computing(num_tokens + sum(result.num_drafts), result.compute_ns)
    if flight.rows:
        state.throughput.note_step(len(flight.rows), num_tokens, flight.planned_ns, now_ns)
    outbox = TokensBuilders()
    if any(result.num_drafts):
        ended = apply_accepted(state, flight, result, outbox, now_ns)
    else:
        if flight.drafts:
            return_drafts(state, flight)
        ended = _apply_tokens(state, flight, result.token_ids, outbox, now_ns)
    if result.vectors:
        end_pooled(flight, result, outbox, ended, now_ns)
    if result.failed:
        _end_failed(flight, result.failed, outbox, ended)
    if result.logprobs or result.prompt_logprobs:
        forward_logprobs(flight, result, outbox, now_ns)
    for request in ended:
        state.retire(request)
        if request.spec.kv_transfer is not None:
            offer(state, request)
    if state.limits.groups.states:
        for request in flight.rows:
            if request.is_preempt_deferred and request.length == len(request.tokens):
                state.preempt(request)
    return outbox.effects(flight.step, now_ns)


def _apply_tokens(
    state: SchedulerState, flight: InFlightPlan, token_column: bytes, outbox: TokensBuilders, now_ns: int
) -> list[Request]:
    """Apply progress and tokens to every valid row; return the requests that end. They keep slot and blocks."""
    ended: list[Request] = []
    detokenizer: int | None = None
    tokens = unpack_i32(token_column)
    num_computed, has_void = sum(flight.counts), False
    drawn = _spread(tokens, flight.samples)
    for request, generation, end, token in zip(
        flight.rows, flight.generations, flight.ends, drawn, strict=True
    ):
        if request.generation != generation:
            has_void = True
            continue
        request.computed = end
        if end >= request.register_at:
            state.register_blocks(request, end)  # the tokens are known: the following step drew from them
        if token is None:
            continue
        if request.detokenizer != detokenizer or not request.has_drawn:
            state.note_first_token(request, now_ns)
            builder = outbox.builder_for(request, now_ns)
            detokenizer = request.detokenizer
            add_id = builder.request_ids.append
            add_index = builder.first_indexes.append
            add_token = builder.token_ids.append
        add_id(request.request_id)
        add_index(end - request.num_prompt)
        add_token(token)
        request.tokens.append(token)
        if token in request.stops or end + 1 >= request.limit or request.repetition is not None:
            ending = ending_of(request)
            if ending is not None:
                builder.finishes[len(builder.request_ids) - 1] = ending
                ended.append(request)
    if has_void:
        rows = zip(flight.rows, flight.generations, flight.counts, strict=True)
        num_computed = sum(count for request, generation, count in rows if request.generation == generation)
    state.counters.computed_tokens += num_computed
    state.counters.generation_tokens += sum(len(builder.token_ids) for builder in outbox.builders.values())
    return ended


def _end_failed(flight: InFlightPlan, failed: bytes, outbox: TokensBuilders, ended: list[Request]) -> None:
    """End requests that the executor reports as failed with an error. Their drawn token is already appended and is invalid."""
    for index in unpack_i32(failed):
        request = flight.rows[index]
        if request.generation != flight.generations[index]:
            continue
        builder = outbox.builders[request.detokenizer]
        builder.finishes[builder.request_ids.index(request.request_id)] = (FinishReason.ERROR, False)
        if not any(request is other for other in ended):
            ended.append(request)


def _spread(tokens: Sequence[int], samples: bytes) -> Sequence[int | None]:
    """Return one entry per row of the plan: its token, or None where it drew none."""
    num_sampled = samples.count(1)
    assert len(tokens) == num_sampled, (
        f"the executor drew {len(tokens)} tokens for {num_sampled} sampling rows"
    )
    if num_sampled == len(samples):
        return tokens
    drawn = iter(tokens)
    return [next(drawn) if sampled else None for sampled in samples]
