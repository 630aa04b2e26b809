"""Invariant checks: every slot, block and token is accounted for exactly once.

Run after every change in tests, and in service when `SchedulerConfig.audit` is set. A violation is a bug and ends the
process with the values in the message.
"""

from __future__ import annotations

from collections import Counter

from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState, by_rank


def check(state: SchedulerState) -> None:
    """Assert every invariant of the state."""
    _check_requests(state)
    _check_slots(state)
    _check_blocks(state)
    waiting = {request.request_id for request in state.waiting}
    for tier in state.pool.tiers.all:
        tier.check(waiting)
    _check_progress(state)


def _check_requests(state: SchedulerState) -> None:
    running, waiting = state.running, state.waiting
    assert all(r.status is Status.RUNNING for r in running), [r.request_id for r in running]
    assert all(r.status is Status.WAITING for r in waiting), [r.request_id for r in waiting]
    for requests in (running, waiting):
        assert requests == sorted(requests, key=by_rank), [r.rank for r in requests]
    listed = Counter(r.request_id for r in running + waiting)
    assert listed == Counter(state.live.keys()), (listed, state.live.keys())
    reserved = sum(state.limits.taken_by(request.limit) for request in state.live.values())
    assert state.num_reserved == reserved, (state.num_reserved, reserved)
    for name, claim, _ in state.hooks.columns:
        num_claims = sum(claim(state, request) for request in state.live.values())
        assert state.num_claims[name] == num_claims, (name, state.num_claims[name], num_claims)


def _check_slots(state: SchedulerState) -> None:
    held = [r.slot for r in state.running]
    every = sorted(held + state.free_slots)
    assert every == list(range(state.limits.num_slots)), (held, state.free_slots)
    assert len(held) <= state.limits.max_running, held
    generations = [r.generation for r in state.running]
    assert len(set(generations)) == len(generations), generations


def _check_blocks(state: SchedulerState) -> None:
    pool = state.pool
    owners: Counter[int] = Counter()
    for request in state.running:
        _check_held(state, request)
        owners.update(block for held in request.kv.held for block in held.blocks)
        owners.update(block for _, blocks in request.kv.pending_states for block in blocks)
        owners.update(request.kv.fork_state_blocks)
    owners.update(pool.pins.held.values())
    for request in state.waiting:
        kv = request.kv
        assert not (kv.held or kv.pending_states or kv.fork_state_blocks), (request.request_id, kv)
    # Compare whole lists and sets rather than single blocks: there are hundreds, after every change.
    places = pool.free + list(pool.cached) + list(pool.fenced) + list(owners)
    assert sorted(places) == list(range(pool.num_blocks)), Counter(places).most_common(3)
    refs = [0] * pool.num_blocks
    for block, count in owners.items():
        refs[block] = count
    assert pool.refs == refs, [
        (block, *both) for block, both in enumerate(zip(pool.refs, refs, strict=True)) if both[0] != both[1]
    ]
    index = pool.index
    assert index.block_of == {key: block for block, key in index.key_of.items()}
    assert len(index.block_of) == len(index.key_of)
    pinned = {key: index.block_of[key] for key in pool.pins.wanted if key in index.block_of}
    assert pool.pins.held == pinned, "held blocks are not those that are pinned and indexed"
    assert index.key_of.keys() >= pool.cached.keys(), pool.cached
    assert index.key_of.keys().isdisjoint(pool.free), pool.free
    in_flight = {flight.step for flight in state.in_flight}
    assert in_flight.issuperset(pool.fenced.values()), (in_flight, pool.fenced)


def _check_held(state: SchedulerState, request: Request) -> None:
    """Check that blocks are unique, that the table covers the next token's window, and that state groups hold at most 2."""
    groups, block_size, tables = state.limits.groups, state.limits.block_size, request.kv.held
    blocks = [block for held in tables for block in held.blocks]
    where = (request.request_id, tables, request.planned, request.num_covered, request.num_unverified_drafts)
    assert len(set(blocks)) == len(blocks), where
    assert len(tables) == len(groups.all), where
    for index, (group, held) in enumerate(zip(groups.all, tables, strict=True)):
        if group.is_state:
            assert 1 <= len(held.blocks) <= 2, where
            newest = held.blocks[-1]
            assert state.pool.refs[newest] == 1 and not state.pool.index.holds(newest), where
            continue
        assert held.begin <= groups.first_block(index, request.planned) or not held.blocks, where
        assert held.end * block_size >= min(request.num_covered, request.planned), where
    if groups.is_plain:
        assert request.num_covered + request.num_unverified_drafts == tables[0].end * block_size, where


def _check_progress(state: SchedulerState) -> None:
    draws: Counter[int] = Counter()
    drafts: Counter[int] = Counter()
    for flight in state.in_flight:
        for row, generation in enumerate(flight.generations):
            draws[generation] += flight.samples[row]
            drafts[generation] += max(0, flight.drafts[row] - 1) if flight.drafts else 0
    for request in state.running:
        _check_lengths(request, draws[request.generation])
        num_drafts = request.num_unverified_drafts
        where = (request.request_id, request.plan_until, request.limit, num_drafts)
        assert request.plan_until == request.limit - num_drafts, where
        assert num_drafts == drafts[request.generation], where
    for request in state.waiting:
        assert request.planned == request.computed == request.num_unverified_drafts == 0, request.request_id
        _check_lengths(request, 0)


def _check_lengths(request: Request, num_draws: int) -> None:
    known = len(request.tokens)
    lengths = (request.computed, request.planned, known, request.length, request.limit)
    where = (request.request_id, lengths, request.num_covered, num_draws)
    assert request.computed <= request.planned <= request.length, where
    assert request.length == known + num_draws, where
    assert request.num_prompt <= known <= request.limit, where
    # Accepted drafts may pass the limit that `SchedulerState.drain` has set: the tokens in flight without drafts.
    assert request.length <= request.limit or request.is_draining, where
    assert request.planned <= request.num_covered or request.status is Status.WAITING, where
