"""Scheduler: choose the requests of one step, their token counts and their blocks.

There are no phases. A request has ``length - planned`` uncomputed tokens, and a step computes some of them under one
token budget, in this order:

1. Running requests with one uncomputed token (decode) are always scheduled, so they never starve. With pipeline stages,
   each step takes one of as many microbatches as there are stages.
2. Running requests with more (chunked prefill, or recomputation after a preemption).
3. Waiting requests, by rank, while slots, blocks and budget last.

Blocks computed by 2 and 3 can be shared at once (`SchedulerState.register_blocks`). Of requests that arrive together
with one prefix, the first computes it and the others reuse it in the same step. If the first computes only a chunk,
the next one continues from it, and the first reuses that result in a later step.

A waiting request enters with blocks for all its tokens, or for a full window. So usually only decode runs out of
blocks (`quintet.core.block_manager` names the exception). The scheduler then preempts the last running
request by rank until the blocks suffice. The first by rank is never preempted by another, and admission ensures that
it fits alone. So at least one request always progresses, and there is no livelock.
"""

from __future__ import annotations

from quintet.core import block_manager, forks, recurrent_state
from quintet.core.hooks import PrefixMatch
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState
from quintet.core.step_builder import StepBuilder
from quintet.wire.limits import MAX_NEW_ROW_BYTES
from quintet.wire.step import StepPlan

NO_MATCH = PrefixMatch(0, ())


def schedule(state: SchedulerState, now_ns: int) -> StepPlan | None:
    """Plan the next step, or return None when no request can be computed now.

    Mutates ``state``: slots, blocks and plans of requests. ``now_ns`` is only used as a timestamp.
    """
    step = StepBuilder()
    budget = state.limits.max_batched
    unfinished = _decode(state, step)
    budget -= len(step.rows)
    is_short = False
    for request in unfinished:
        if budget <= 0:
            break
        _catch_up(state, step, request)
        wanted = _allowance(state, request, request.length - request.planned, budget)
        count = block_manager.allocate(state, step, request, wanted) if wanted > 0 else 0
        if count > 0:
            _compute(state, step, request, count)
            budget -= count
        is_short |= count < min(wanted, 1)
    if is_short and not (step.rows or step.blocks or state.in_flight):
        state.preempt(state.running[-1])  # no other request will free the blocks that the first ones need
        return schedule(state, now_ns)
    if state.waiting and not is_short:
        state.num_deferred = _admit_waiting(state, step, budget, now_ns)
    return step.finish(state, now_ns)


def _decode(state: SchedulerState, step: StepBuilder) -> list[Request]:
    """Add the requests with one uncomputed token, and return those with more."""
    rows, starts = step.rows, step.starts
    is_plain, has_states = state.limits.groups.is_plain, bool(state.limits.groups.states)
    unfinished: list[Request] = []
    num_reserved = 0
    num_left, drawn_for = _stage_share(state)
    for request in state.running:  # `_free_blocks` removes from its end
        if request.is_preempt_deferred:
            continue
        planned = request.planned
        length = planned + 1
        if request.length != length:
            unfinished.append(request)
            continue
        if length >= request.plan_until:
            continue  # every token up to its limit is known or in flight
        if len(rows) >= num_left or request.request_id in drawn_for:
            continue  # scheduled with another stage's step
        if planned == request.num_covered:
            if has_states and request.num_unverified_drafts:
                continue  # a checkpoint needs the exact length
            if not is_plain:
                num_lacking = _extend(state, step, request, num_reserved)
                if num_lacking:
                    num_reserved += num_lacking if _may_use_blocks(request) else 0
                    continue
            else:
                if not _free_blocks(state, request, 1, num_reserved):
                    num_reserved += _may_use_blocks(request)
                    continue
                blocks, block = request.kv.held[0].blocks, state.pool.take()
                step.blocks += (request.slot, 0, len(blocks), block)
                blocks.append(block)
                request.num_covered += state.limits.block_size
        rows.append(request)
        starts.append(planned)
        request.planned = length
        request.length = length + 1
    step.counts += [1] * len(rows)
    step.samples += b"\1" * len(rows)
    return unfinished


def _stage_share(state: SchedulerState) -> tuple[int, set[int]]:
    """Return the number of decode rows of the next step, and the ids of requests that still wait for their newest token.

    Steps that are in flight at the same time share no decoding request. The remaining ones are divided evenly among
    the remaining stages. With one stage, a step takes all.
    """
    num_before = state.limits.stages - 1
    if not num_before:
        return len(state.running), set()
    flights = list(state.in_flight)[-num_before:]
    drawn_for = {
        request.request_id
        for flight in flights
        for request, draws in zip(flight.rows, flight.samples, strict=True)
        if draws
    }
    num_left = sum(
        request.length == request.planned + 1 < request.limit
        and not request.is_preempt_deferred
        and request.request_id not in drawn_for
        for request in state.running
    )
    return -(-num_left // (state.limits.stages - len(flights))), drawn_for


def _extend(state: SchedulerState, step: StepBuilder, request: Request, num_reserved: int) -> int:
    """Give a decoding request its next blocks, preempting others; return the number of blocks still missing."""
    num_lacking = block_manager.extend(state, step, request)
    while num_lacking and _free_blocks(state, request, num_lacking, num_reserved):
        num_lacking = block_manager.extend(state, step, request)
    return num_lacking


def _free_blocks(state: SchedulerState, request: Request, num_wanted: int, num_reserved: int) -> bool:
    """Return True when ``num_wanted`` blocks are available for ``request``, preempting others until they are or will be.

    A victim's blocks stay fenced while steps in flight use them, or stay with it until then
    (`SchedulerState.defer_preempt`). They are reserved for the requests that lacked blocks in this step, in order.
    The last victim may be ``request`` itself.
    """
    pool = state.pool
    if pool.num_available >= num_wanted:
        return True
    while num_reserved + num_wanted > pool.num_available + len(pool.fenced) + _num_deferred_blocks(state):
        victim = next(each for each in reversed(state.running) if not each.is_preempt_deferred)
        state.defer_preempt(victim)
        if victim is request:
            return False
    return pool.num_available >= num_wanted


def _num_deferred_blocks(state: SchedulerState) -> int:
    """Return the number of blocks freed when the requests marked for preemption leave."""
    if not state.limits.groups.states:
        return 0
    deferred = [held for request in state.running if request.is_preempt_deferred for held in request.kv.held]
    return sum(state.pool.refs[block] == 1 for held in deferred for block in held.blocks)


def _may_use_blocks(request: Request) -> bool:
    """Return True when a request that lacks blocks will use freed ones: it was not preempted itself."""
    return request.status is Status.RUNNING and not request.is_preempt_deferred


def _allowance(state: SchedulerState, request: Request, wanted: int, budget: int) -> int:
    """Return the number of tokens that the request may compute now."""
    if wanted > 1:
        for hook in state.hooks.limit_tokens:
            wanted = hook(state, request, wanted, budget)
    return min(wanted, budget)


def _admit_waiting(state: SchedulerState, step: StepBuilder, budget: int, now_ns: int) -> int:
    """Admit waiting requests by rank until slots, blocks, budget or frame run out; return the number that was passed over."""
    waiting, running = state.waiting, state.running
    position = 0
    while budget > 0 and position < len(waiting) and len(running) < state.limits.max_running:
        request = waiting[position]
        if not _may_enter(state, request):
            position += 1
            continue
        found = _longest_source(state, request)
        count = _allowance(state, request, request.length - found.num_tokens, budget)
        num_own, pool = block_manager.num_new_blocks(state, request, found), state.pool
        num_spare = pool.num_available - (state.limits.watermark if running else 0)
        num_needed = sum(num_own)
        for held in found.shared:
            num_needed += pool.cost_of_sharing(held.blocks)
        if found.tails:
            num_needed += pool.cost_of_sharing(found.known_tails)
        if count <= 0 or num_needed > num_spare:
            return position  # a later request must not take the blocks that this one needs
        count = _enter(state, step, request, found, num_own, count)
        if request.stats.scheduled_ns is None:
            request.stats.scheduled_ns = now_ns
            _count_first_entry(state, request, found, now_ns)
        _compute(state, step, request, count)
        budget -= count
        if step.new_row_bytes >= MAX_NEW_ROW_BYTES:
            break
    return position


def _may_enter(state: SchedulerState, request: Request) -> bool:
    """Return True when a waiting request may enter; otherwise later ones pass it."""
    if not state.may_run(request) or (request.parent and not forks.can_enter(state, request.parent)):
        return False
    hooks = state.hooks.can_schedule
    return not hooks or all(hook(state, request) for hook in hooks)


def _catch_up(state: SchedulerState, step: StepBuilder, request: Request) -> None:
    """Replace the next blocks of a prefilling request by full ones that others have computed since."""
    found = _longest_source(state, request)
    if not found.tails and not found.restored and found.num_tokens > request.planned:
        block_manager.catch_up(state, step, request, found)


def _compute(state: SchedulerState, step: StepBuilder, request: Request, count: int) -> None:
    """Add a row of a request with known tokens; later rows of this step may share its blocks."""
    step.add(request, count)
    if request.planned >= request.register_at:
        state.register_blocks(request, request.planned)


def _longest_source(state: SchedulerState, request: Request) -> PrefixMatch:
    """Return the longest match of a prefix; of equal ones, that of the last hook."""
    best = (request.parent and forks.match_prompt(state, request, request.parent)) or NO_MATCH
    for hook in state.hooks.match_prefix:
        found = hook(state, request)
        if found is not None and found.num_tokens >= best.num_tokens:
            best = found
    return best


def _enter(
    state: SchedulerState,
    step: StepBuilder,
    request: Request,
    found: PrefixMatch,
    num_own: list[int],
    count: int,
) -> int:
    """Give a request its slot and blocks, start it after the prefix match, and return its token count in this step."""
    state.start(request)
    block_manager.fill(state, step, request, found, num_own)
    if request.parent is not None:
        state.release_fork_state(request.parent)
    if state.pool.tiers.all:
        state.pool.tiers.forget(request.request_id)
    request.planned = request.computed = found.num_tokens
    block_size = state.limits.block_size
    num_restored = max(map(len, found.restored)) if found.restored else 0
    request.register_at = (max(0, found.num_tokens // block_size - num_restored) + 1) * block_size
    if state.limits.groups.states:
        recurrent_state.begin(state, request)
        count = recurrent_state.cut(state, request, count)
    block_manager.set_num_covered(state, request, request.planned + count)
    step.add_new_row(request, state.limits.groups)
    return count


def _count_first_entry(state: SchedulerState, request: Request, found: PrefixMatch, now_ns: int) -> None:
    request.stats.num_cached = found.num_cached
    request.stats.num_computed = max(0, request.num_prompt - found.num_tokens)
    counters = state.counters
    counters.prefix_queries += found.num_queried
    counters.prefix_hits += found.num_cached if found.num_queried else 0
    if request.parent is None:
        state.throughput.computed_share.note(request.stats.num_computed / request.num_prompt)
        counters.prompt_tokens += request.num_prompt
        counters.prompt_tokens_cached += found.num_cached
    state.queue_times_ns.append(max(0, now_ns - request.spec.arrival_ns))
