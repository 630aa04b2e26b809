"""Commit of a step that verified draft tokens: a row may have several tokens, and its lengths were planned for all drafts."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.token_messages import Ending, TokensBuilders, ending_of
from quintet.wire.codec import unpack_i32
from quintet.wire.step import StepResult


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
