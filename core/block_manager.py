"""Block tables of running requests: allocation on entry, growth, and sliding windows.

A group releases blocks outside its window while the request runs. A request gets the most blocks it will need
(`KvGroup.most_blocks`) when it enters, so chunked prefill never needs more than it releases. When no block is
available, its own released blocks are reused. It waits only while others share those, or a step in flight reads them.
"""

from __future__ import annotations

from collections.abc import Collection

from quintet.core import recurrent_state
from quintet.core.hooks import PrefixMatch
from quintet.core.kv.groups import GroupBlocks
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState
from quintet.core.step_builder import StepBuilder

NO_BLOCKS = GroupBlocks()


def num_new_blocks(state: SchedulerState, request: Request, found: PrefixMatch) -> list[int]:
    """Return the number of new blocks per group for a request that enters after the prefix match."""
    groups, length = state.limits.groups, request.length
    end = -(-length // state.limits.block_size)
    if groups.is_plain:
        return [end - (found.shared[0].end if found.shared else 0)]
    wanted = []
    for index, group in enumerate(groups.all):
        shared = found.shared[index] if found.shared else NO_BLOCKS
        most = groups.most_blocks(index, length)
        wanted.append(1 if group.is_state else min(end - shared.end, most - len(shared.blocks)))
    return wanted


def fill(
    state: SchedulerState, step: StepBuilder, request: Request, found: PrefixMatch, num_own: list[int]
) -> None:
    """Set the blocks of a request that enters: the matched ones and new ones."""
    pool, groups = state.pool, state.limits.groups
    for held in found.shared:
        pool.share(held.blocks)  # before anything is allocated: allocation may evict
    if found.tails:
        pool.share(found.known_tails)
        step.borrowed += found.known_tails
    take = pool.take
    for index, count in enumerate(num_own):
        shared = found.shared[index] if found.shared else NO_BLOCKS
        request.kv.held.append(GroupBlocks(shared.begin, shared.blocks + [take() for _ in range(count)]))
    if found.tails:
        for index, tail in zip(groups.tokens, found.tails, strict=False):
            held = request.kv.held[index]
            if tail is not None:
                step.copy(tail, held.blocks[found.num_tokens // state.limits.block_size - held.begin])
    for index, host_blocks in enumerate(found.restored):
        own = request.kv.held[index].blocks[len(found.shared[index].blocks) :]
        for block, host_block in zip(own, host_blocks, strict=False):
            step.swaps_in += (block, host_block)


def extend(state: SchedulerState, step: StepBuilder, request: Request) -> int:
    """Allocate the blocks for the next token of a decoding request. Return the number missing; then nothing has changed."""
    groups, pool = state.limits.groups, state.pool
    planned, block_size = request.planned + request.num_unverified_drafts, state.limits.block_size
    short = [index for index in groups.tokens if request.kv.held[index].end * block_size <= planned]
    moved: dict[int, int] = {}
    if pool.num_available < len(short):
        candidates = {index: _movable(state, request, index) for index in short if index in groups.windowed}
        moved = {index: blocks[0] for index, blocks in candidates.items() if blocks}
    if pool.num_available < len(short) - len(moved):
        return len(short) - len(moved)
    for index in groups.windowed:
        _release_passed(state, request, index, moved.values())
    for index in short:
        block = moved.get(index)
        if block is None:
            block = pool.take()
        else:
            pool.move(block)
        _append(step, request, index, block)
    if groups.states:
        recurrent_state.prepare(state, step, request)
    set_num_covered(state, request, planned + 1)
    return 0


def extend_early(state: SchedulerState, step: StepBuilder, request: Request, count: int) -> None:
    """Give a decoding request a block for its next ``count`` tokens in each group that lacks one, if blocks are plentiful."""
    limits, pool = state.limits, state.pool
    end = request.planned + request.num_unverified_drafts + count
    groups = limits.groups.tokens
    short = [index for index in groups if request.kv.held[index].end * limits.block_size < end]
    if not short or pool.num_available < limits.watermark + len(state.running) + len(short):
        return
    for index in short:
        _append(step, request, index, pool.take())
    set_num_covered(state, request, request.planned)


def allocate(state: SchedulerState, step: StepBuilder, request: Request, count: int) -> int:
    """Allocate blocks for the next ``count`` tokens; return the number of tokens that have blocks, possibly 0."""
    groups, block_size = state.limits.groups, state.limits.block_size
    if groups.is_plain:
        return count
    if groups.states:
        count = recurrent_state.cut(state, request, count)
    if groups.windowed:
        end = _reach(state, request, -(-(request.planned + count) // block_size))
        count = min(count, end * block_size - request.planned)
        if count <= 0:
            return 0
        num_wanted = sum(max(0, end - request.kv.held[index].end) for index in groups.windowed)
        is_scarce = num_wanted > state.pool.num_available
        for index in groups.windowed:
            _move_window(state, step, request, index, end, is_scarce)
    if groups.states:
        recurrent_state.prepare(state, step, request)
    set_num_covered(state, request, request.planned + count)
    return count


def _reach(state: SchedulerState, request: Request, end: int) -> int:
    """Return the position, at most ``end``, up to which tables can be filled from available and releasable blocks."""
    pool, groups = state.pool, state.limits.groups
    tables = [(request.kv.held[index].end, len(_movable(state, request, index))) for index in groups.windowed]
    while sum(max(0, end - filled - movable) for filled, movable in tables) > pool.num_available:
        end -= 1
    return end


def _move_window(
    state: SchedulerState, step: StepBuilder, request: Request, index: int, end: int, is_scarce: bool
) -> None:
    """Fill a group's table up to ``end``. Blocks outside the window go back to the pool, unless blocks are scarce:
    then they are reused directly.
    """
    pool, num_wanted = state.pool, max(0, end - request.kv.held[index].end)
    moved = _movable(state, request, index)[:num_wanted] if is_scarce else []
    _release_passed(state, request, index, moved)
    for block in moved:
        pool.move(block)
    for block in moved + [pool.take() for _ in range(num_wanted - len(moved))]:
        _append(step, request, index, block)


def catch_up(state: SchedulerState, step: StepBuilder, request: Request, found: PrefixMatch) -> None:
    """Replace a request's next blocks by full ones that others have computed since it entered."""
    groups, pool, block_size = state.limits.groups, state.pool, state.limits.block_size
    end, planned = found.num_tokens // block_size, request.planned // block_size
    for index, group in enumerate(groups.all):
        held, shared = request.kv.held[index], found.shared[index]
        if group.is_state:
            recurrent_state.exchange(state, step, request, index, shared.blocks)
            continue
        # Blocks shared after `planned` stay as they are.
        first = max(shared.begin, min(planned, held.end))
        blocks = shared.blocks[first - shared.begin :]
        pool.share(blocks)
        before = held.blocks[max(0, shared.begin - held.begin) : max(0, first - held.begin)]
        rest = held.blocks[max(0, end - held.begin) :]
        gone = held.before(shared.begin) + held.blocks[max(0, first - held.begin) : max(0, end - held.begin)]
        pool.release(gone, state.fence)
        request.kv.held[index] = GroupBlocks(first - len(before), before + blocks + rest)
        for position, block in enumerate(blocks, first):
            step.blocks += (request.slot, index, position, block)
    if not request.stats.num_preemptions:
        request.stats.num_computed -= max(0, min(request.num_prompt, found.num_tokens) - request.planned)
    request.planned = found.num_tokens
    request.register_at = (end + 1) * block_size
    if groups.states:
        recurrent_state.begin(state, request)
    set_num_covered(state, request, request.planned)


def set_num_covered(state: SchedulerState, request: Request, end: int) -> None:
    """Set the token count up to which the blocks need no check, once ``end`` tokens are planned."""
    groups, block_size = state.limits.groups, state.limits.block_size
    if groups.is_plain:
        request.num_covered = request.kv.held[0].end * block_size - request.num_unverified_drafts
        return
    num_covered = (
        min((request.kv.held[index].end for index in groups.tokens), default=request.limit) * block_size
    )
    if groups.states:
        num_covered = recurrent_state.num_covered(state, request, end, num_covered)
    request.num_covered = num_covered - request.num_unverified_drafts


def _movable(state: SchedulerState, request: Request, index: int) -> list[int]:
    """Return the blocks that leave the group's window at the next token and may be reused."""
    passed = request.kv.held[index].before(state.limits.groups.first_block(index, request.planned))
    return [block for block in passed if state.pool.may_move(block)]


def _release_passed(state: SchedulerState, request: Request, index: int, spared: Collection[int]) -> None:
    """Release the blocks that leave the group's window at the next token, except those reused in the same table."""
    held = request.kv.held[index]
    first = state.limits.groups.first_block(index, request.planned)
    gone = [block for block in held.before(first) if block not in spared]
    held.drop(first)
    if gone:
        state.pool.release(gone[::-1], state.fence)


def _append(step: StepBuilder, request: Request, index: int, block: int) -> None:
    held = request.kv.held[index]
    step.blocks += (request.slot, index, held.end, block)
    held.blocks.append(block)
