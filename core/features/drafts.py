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

from collections.abc import Sequence
from functools import partial

from quintet.core import block_manager
from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.step_builder import StepBuilder
from quintet.core.token_messages import Ending, TokensBuilders, ending_of
from quintet.wire.codec import unpack_i32
from quintet.wire.step import StepResult


def build(setup: Setup) -> Feature | None:
    config = setup.scheduler.speculative
    if config is None:
        return None
    return Feature("drafts", claim=claim, attach=partial(attach, config.num_speculative_tokens))


def claim(state: SchedulerState, request: Request) -> bool:
    """Return True: every request may have drafts."""
    return True


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


def apply_accepted(
    state: SchedulerState, flight: InFlightPlan, result: StepResult, outbox: TokensBuilders, now_ns: int
) -> list[Request]:
    """Apply the tokens of a step in which rows may have several: one drawn, and accepted drafts. Return the requests that end."""
    ended: list[Request] = []
    tokens, counters = unpack_i32(result.token_ids), state.counters
    num_draws = flight.samples.count(1)
    counts = result.num_tokens or b"\1" * num_draws
    assert len(counts) == num_draws and all(counts), (
        f"{num_draws} sampling rows, tokens of each: {list(counts)}"
    )
    if num_draws:
        state.throughput.tokens_per_draw.note(sum(counts) / num_draws)
    num_tokens, num_drafts_of = iter(counts), iter(result.num_drafts or bytes(num_draws))
    begin = 0
    for row, request in enumerate(flight.rows):
        count, num_verified = (next(num_tokens), next(num_drafts_of)) if flight.samples[row] else (0, 0)
        drawn = tokens[begin : begin + count]
        begin += count
        if request.generation != flight.generations[row]:
            continue
        num_more, num_drafts = max(0, count - 1), max(0, flight.drafts[row] - 1)
        assert num_more <= num_drafts, f"row {row} has {count} tokens; the plan allows {num_drafts} drafts"
        counters.num_draft_tokens += num_verified
        counters.num_drafts += num_verified > 0
        request.num_unverified_drafts -= num_drafts
        request.num_covered += num_drafts
        request.plan_until += num_drafts
        request.planned += num_more
        request.length += num_more
        known = len(request.tokens)
        end = known + num_more if flight.drafts[row] else flight.ends[row]
        counters.computed_tokens += end - request.computed if flight.drafts[row] else flight.counts[row]
        request.computed = end
        if drawn:
            builder = outbox.builder_for(request, now_ns)
            state.note_first_token(request, now_ns)
            ending = _append_accepted(request, drawn)
            num_kept = len(request.tokens) - known
            if ending is not None:
                builder.finishes[len(builder.request_ids)] = ending
                ended.append(request)
            if num_kept != 1:
                builder.num_tokens[len(builder.request_ids)] = num_kept
            if num_verified:
                builder.num_drafts[len(builder.request_ids)] = num_verified
            builder.request_ids.append(request.request_id)
            builder.first_indexes.append(known - request.num_prompt)
            builder.token_ids += drawn[:num_kept]
            num_accepted = min(num_more, num_kept)
            counters.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                counters.num_accepted_tokens_per_pos[position] += 1
            counters.generation_tokens += num_kept
        if request.computed >= request.register_at:
            state.register_blocks(request, min(request.computed, len(request.tokens)))
    return ended


def _append_accepted(request: Request, drawn: Sequence[int]) -> Ending | None:
    """Append tokens up to the first that ends the request; return the ending."""
    for token in drawn:
        request.tokens.append(token)
        if token in request.stops or len(request.tokens) >= request.limit or request.repetition is not None:
            ending = ending_of(request)
            if ending is not None:
                return ending
    return None
