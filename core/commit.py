"""Commit of a step's result: append tokens, register full blocks, end requests, offer KV to peers.

A request may lose its slot after the plan was made (stop, cancel, preemption). Its row then has an older generation,
and the result is dropped.

KV publication offers the full prompt blocks of an ended request to other servers (disaggregated prefill).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quintet.core.block_keys import digests_of, keys_after
from quintet.core.features.drafts import return_drafts
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.prefix import reach
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.token_messages import Ending, StepMessages, TokensBuilders
from quintet.wire.codec import unpack_i32
from quintet.wire.messages import FinishReason
from quintet.wire.step import PromptLogprobs, StepResult, TokenLogprobs


def offer(state: SchedulerState, request: Request) -> None:
    """Offer the full prompt blocks of a request that has just ended, while the device still has them."""
    peers, kv_transfer = state.pool.tiers.find(PeerPool), request.spec.kv_transfer
    if peers is None or kv_transfer is None or not kv_transfer.offers:
        return
    limits, index = state.limits, state.pool.index
    groups, size = limits.groups.all, limits.block_size
    most = request.num_prompt // size
    num_blocks = reach(index.block_of, digests_of(state, request, most), most, groups, size)
    for group in range(len(groups)):
        peers.offer(keys_after(state, request, group, num_blocks * size))


def commit(state: SchedulerState, result: StepResult, now_ns: int) -> StepMessages:
    """Apply the result of the oldest step in flight and return the messages to send.

    A result of any other step is ignored: its plan was forgotten when the executor was replaced.
    """
    if not state.in_flight or state.in_flight[0].step != result.step:
        return StepMessages()
    flight = state.in_flight.popleft()
    state.counters.steps += 1
    state.pool.settle(flight.step)
    num_tokens = sum(flight.counts)
    state.throughput.note_computing(num_tokens + sum(result.num_drafts), result.compute_ns)
    if flight.rows:
        state.throughput.note_step(len(flight.rows), num_tokens, flight.planned_ns, now_ns)
    outbox = TokensBuilders()
    if any(result.num_drafts):
        ended = _apply_accepted(state, flight, result, outbox, now_ns)
    else:
        if flight.drafts:
            return_drafts(state, flight)
        ended = _apply_tokens(state, flight, result.token_ids, outbox, now_ns)
    if result.failed:
        _end_failed(flight, result.failed, outbox, ended)
    if result.logprobs or result.prompt_logprobs:
        _forward_logprobs(flight, result, outbox, now_ns)
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
    num_computed = 0
    drawn, columns = _spread(tokens, flight.samples), (flight.generations, flight.counts, flight.ends)
    for request, generation, count, end, token in zip(flight.rows, *columns, drawn, strict=True):
        if request.generation != generation:
            continue
        num_computed += count
        request.computed = end
        if end >= request.register_at:
            state.register_blocks(request, end)  # the tokens are known: the following step drew from them
        if token is None:
            continue
        if request.detokenizer != detokenizer or not request.has_drawn:
            _note_first(state, request, now_ns)
            builder = outbox.builder_for(request, now_ns)
            detokenizer = request.detokenizer
            add_id, add_index, add_token = (
                builder.request_ids.append,
                builder.first_indexes.append,
                builder.token_ids.append,
            )
        add_id(request.request_id)
        add_index(end - request.num_prompt)
        add_token(token)
        request.tokens.append(token)
        if token in request.stops or end + 1 >= request.limit or request.repetition is not None:
            ending = ending_of(request)
            if ending is not None:
                builder.finishes[len(builder.request_ids) - 1] = ending
                ended.append(request)
    state.counters.computed_tokens += num_computed
    state.counters.generation_tokens += sum(len(builder.token_ids) for builder in outbox.builders.values())
    return ended


def _apply_accepted(
    state: SchedulerState, flight: InFlightPlan, result: StepResult, outbox: TokensBuilders, now_ns: int
) -> list[Request]:
    """Like `_apply_tokens`, for a step in which rows may have several tokens: one drawn, and accepted drafts."""
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
            _note_first(state, request, now_ns)
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


def _note_first(state: SchedulerState, request: Request, now_ns: int) -> None:
    """Record the time of a request's first drawn token."""
    if not request.has_drawn:
        request.has_drawn, request.stats.first_token_ns = True, now_ns
        state.counters.first_tokens += 1


def _append_accepted(request: Request, drawn: Sequence[int]) -> Ending | None:
    """Append tokens up to the first that ends the request; return the ending."""
    for token in drawn:
        request.tokens.append(token)
        if token in request.stops or len(request.tokens) >= request.limit or request.repetition is not None:
            ending = ending_of(request)
            if ending is not None:
                return ending
    return None


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


def ending_of(request: Request) -> Ending | None:
    """Return the finish reason caused by the newest output; None when the request continues."""
    if request.num_outputs > request.spec.params.min_tokens:
        is_named = request.stops.get(request.tokens[-1])
        if is_named is not None:
            return FinishReason.STOP, is_named
        watch = request.repetition
        if watch is not None and watch.has_repeated(request.tokens, request.num_prompt):
            return FinishReason.REPETITION, False
    return (FinishReason.LENGTH, False) if len(request.tokens) >= request.limit else None


def _forward_logprobs(flight: InFlightPlan, result: StepResult, outbox: TokensBuilders, now_ns: int) -> None:
    """Forward log-probabilities, with row numbers of the `Tokens` messages instead of the plan."""
    rows_of = {
        index: {request_id: row for row, request_id in enumerate(builder.request_ids)}
        for index, builder in outbox.builders.items()
    }
    for entry in result.prompt_logprobs:
        request = flight.rows[entry.row]
        if request.generation != flight.generations[entry.row]:
            continue
        unseen = _unseen_part(request, entry)
        if unseen is None:
            continue
        builder = outbox.builder_for(request, now_ns)
        rows = rows_of.setdefault(request.detokenizer, {})
        if request.request_id not in rows:
            rows[request.request_id] = builder.add_empty(request)
        unseen.row = rows[request.request_id]
        builder.prompt_logprobs.append(unseen)
    num_entries: Counter[int] = Counter()
    for drawn in result.logprobs:
        request = flight.rows[drawn.row]
        if request.generation != flight.generations[drawn.row]:
            continue
        builder = outbox.builders[request.detokenizer]
        row = rows_of[request.detokenizer][request.request_id]
        num_entries[request.request_id] += 1
        if num_entries[request.request_id] <= builder.num_tokens.get(
            row, 1
        ):  # else after the token that ended the request
            builder.logprobs.append(TokenLogprobs(row, drawn.rank, drawn.token_ids, drawn.logprobs))


def _unseen_part(request: Request, entry: PromptLogprobs) -> PromptLogprobs | None:
    """Cut off positions that were sent before: a preempted prompt is recomputed, possibly in other chunks."""
    num_entries = len(entry.ranks) // 4
    skip = max(0, request.delivery.prompt_logprobs_end - entry.first)
    if skip >= num_entries:
        return None
    request.delivery.prompt_logprobs_end = entry.first + num_entries
    width = 4 * entry.width
    return PromptLogprobs(
        row=entry.row,
        first=entry.first + skip,
        width=entry.width,
        ranks=entry.ranks[4 * skip :],
        token_ids=entry.token_ids[width * skip :],
        logprobs=entry.logprobs[width * skip :],
    )
