"""States of fixed size: which block a step reads a request's state from, which it writes, and which states are kept for others.

A state is overwritten by every step, so what is to outlive that is never copied, but not written any more::

    step        reads    writes
     7            4        4          one block, while nobody else wants the state
     8            4        9          the state behind step 7 is kept: block 4 is read once more, and then left to the cache
     9            9        9

Kept are the states that requests with the same beginning can go on from: behind most of a prompt (`GRAIN`), behind every
`KEEP_EVERY` tokens, and, for further choices of one prompt, behind all of it but the last token. A prompt's pieces end there.
The last state of all is behind what a request has computed when it ends (`SchedulerState.retire`).

Where that is in the middle of a block, the block is not written any more either, in any group: the request writes on in a copy::

    tokens      | 0 … 1023 | 1024 … 1500 |          the block of 1024 is left to the cache with what it holds,
                                  1501 … |          its copy is what the request goes on with

Keeping is a favour: where no block is to spare the state is written over, and who would have begun there computes more.
"""

from __future__ import annotations

from quintet.core.request import Request
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.core.step_builder import StepBuilder

KEEP_EVERY = 1024
"""Tokens, rounded up to whole blocks: pieces so long are computed as fast, token for token, as longer ones, and what a state
takes is a small part of what as many tokens' keys and values do."""

GRAIN = 16
"""A prompt's state is kept behind so many tokens or a multiple, the last one that leaves a token to compute; where blocks hold
fewer, behind the last full one. Not behind all but one: a chat's next turn may leave out how its last answer began."""


def begin(state: SchedulerState, request: Request) -> None:
    """Note where states of a request are kept that is to go on behind ``planned`` tokens, from what was found or from nothing."""
    request.begins_at = request.planned
    held = [request.held[index].blocks for index in state.limits.groups.states]
    # A state that came back from the host lies in the request's own block, which its next step writes over.
    if request.planned == _end_for_choices(state, request) and all(len(blocks) == 2 for blocks in held):
        _keep_for_choices(state, request, [blocks[0] for blocks in held])
    request.keep_at = _next_kept(state, request)


def cut(state: SchedulerState, request: Request, count: int) -> int:
    """Return how many of its next ``count`` tokens a request computes before its state is to be kept."""
    keep_at = request.keep_at
    if keep_at == request.planned:
        keep_at = _next_kept(state, request)
    return count if keep_at is None else min(count, keep_at - request.planned)


def prepare(state: SchedulerState, step: StepBuilder, request: Request) -> None:
    """Say which blocks the next tokens' step reads and writes; keep the state behind those before them, if it is due."""
    groups, pool, planned = state.limits.groups, state.pool, request.planned
    is_new = planned == request.begins_at  # what it reads and writes was said when it was found
    is_kept = planned == request.keep_at and not is_new and pool.num_available > _reserve(state)
    is_for_choices = planned == _end_for_choices(state, request)
    if planned == request.keep_at:
        request.keep_at = _next_kept(state, request)
    current: list[int] = []
    for index in groups.states:
        blocks = request.held[index].blocks
        if len(blocks) == 2 and not is_new:
            pool.release([blocks.pop(0)], state.fence)
            step.blocks += (request.slot, index, 0, blocks[0])
        current.append(blocks[0])
        if is_kept:
            blocks.append(pool.take())
            step.blocks += (request.slot, index, 1, blocks[1])
    if is_kept:
        _name(state, step, request, current)
    if is_kept and is_for_choices:
        _keep_for_choices(state, request, current)


def exchange(
    state: SchedulerState, step: StepBuilder, request: Request, index: int, found: list[int]
) -> None:
    """Have a request go on from a state that others have kept."""
    held = request.held[index]
    state.pool.share(found)
    state.pool.release(held.blocks[:-1], state.fence)
    held.blocks = [*found, held.blocks[-1]]
    step.blocks += (request.slot, index, 0, held.blocks[0], request.slot, index, 1, held.blocks[1])


def last_kept(limits: Limits, num_prompt: int) -> int:
    """Return behind how many tokens of a prompt, whole blocks of them, the last state is kept that others can begin behind."""
    size = limits.block_size
    grain, every = min(GRAIN, size), -(-KEEP_EVERY // size) * size
    end = (num_prompt - 1) // grain * grain
    return end if not end % size else end // every * every


def room_of(state: SchedulerState, request: Request, end: int, room: int) -> int:
    """Return until when nothing is to be done about a request's states: at most ``room``, and at least ``end`` tokens."""
    if any(len(request.held[index].blocks) == 2 for index in state.limits.groups.states):
        return end
    return room if request.keep_at is None else min(room, request.keep_at)


def _next_kept(state: SchedulerState, request: Request) -> int | None:
    """Return behind how many tokens, more than are planned, a state is kept next."""
    limits, planned = state.limits, request.planned
    wanted = [_end_for_choices(state, request)]
    if limits.prefix_caching:
        block_size = limits.block_size
        every = -(-KEEP_EVERY // block_size) * block_size
        grain = min(GRAIN, block_size)
        wanted += [(planned // every + 1) * every, (len(request.tokens) - 1) // grain * grain]
    return min((end for end in wanted if end is not None and end > planned), default=None)


def _end_for_choices(state: SchedulerState, request: Request) -> int | None:
    """Return behind how many tokens further choices of a request begin, if some have still to."""
    if request.parent is not None or request.params.n == 1 or not _has_choices(state, request):
        return None
    return request.num_prompt - 1


def _has_choices(state: SchedulerState, request: Request) -> bool:
    return any(other.parent is request for other in state.waiting)


def _keep_for_choices(state: SchedulerState, request: Request, blocks: list[int]) -> None:
    if request.planned and not request.for_choices:
        state.pool.share(blocks)
        request.for_choices = blocks


def _name(state: SchedulerState, step: StepBuilder, request: Request, blocks: list[int]) -> None:
    """Make a kept state findable, now or when the tokens before it are known."""
    planned, block_size = request.planned, state.limits.block_size
    if not state.limits.prefix_caching or planned % min(GRAIN, block_size):
        return
    if planned > len(request.tokens):
        state.pool.share(blocks)
        request.unnamed.append((planned, blocks))
    else:
        tails = _leave_tails(state, step, request) if planned % block_size else {}
        state.name_state(request, planned, blocks, tails)


def _leave_tails(state: SchedulerState, step: StepBuilder, request: Request) -> dict[int, int]:
    """Have a request write on in copies of its last blocks; return, by group, the blocks themselves, which are left to others."""
    position, tails = request.planned // state.limits.block_size, dict[int, int]()
    for index in state.limits.groups.tokens:
        held = request.held[index]
        block = state.pool.take()
        tails[index], held.blocks[position - held.begin] = held.blocks[position - held.begin], block
        step.copy(tails[index], block)
        step.blocks += (request.slot, index, position, block)
    step.borrowed += tails.values()
    return tails


def _reserve(state: SchedulerState) -> int:
    """Return how many blocks must be left to requests, which need them more than those that may come."""
    return state.limits.watermark + len(state.running) + len(state.limits.groups.all)
