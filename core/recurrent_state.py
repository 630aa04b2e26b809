"""Recurrent states: the block a step reads a request's state from, the one it writes, and the checkpoints kept for reuse.

A state is overwritten in place until it becomes a checkpoint:

    step        reads    writes
     7            4        4          in place
     8            4        9          checkpoint after step 7: block 4 is read once more, then left to the cache
     9            9        9

Checkpoints let requests with the same prefix resume: near the end of a prompt (`GRAIN`), every `CHECKPOINT_EVERY` tokens,
and for further choices after all but the last prompt token. Prefill chunks end there. The final state of a request is
registered when it ends (`SchedulerState.retire`).

A checkpoint inside a block also leaves the partial KV blocks to the cache and continues in copies:

    tokens      | 0 … 1023 | 1024 … 1500 |          the block of 1024 is left to the cache with its content,
                                  1501 … |          its copy is what the request continues in

Checkpoints are optional: when blocks are scarce, the state is overwritten and later requests recompute more.
"""

from __future__ import annotations

from quintet.core.requests.request import Request
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.core.step_builder import StepBuilder

CHECKPOINT_EVERY = 1024
"""Checkpoint interval in tokens, rounded up to whole blocks.

Longer prefill chunks are no faster per token, and a state is small compared with the KV of that many tokens.
"""

GRAIN = 16
"""Granularity of the last checkpoint of a prompt, in tokens; at least one token is left to compute.

With smaller blocks it follows the last full block. It precedes the end of the prompt because the next chat turn may
omit the beginning of the previous answer.
"""


def begin(state: SchedulerState, request: Request) -> None:
    """Initialize the state bookkeeping of a request that starts after ``planned`` tokens, with or without a matched state."""
    request.kv.state_start = request.planned
    held = [request.kv.held[index].blocks for index in state.limits.groups.states]
    # A state restored from the host is in the request's own block, which its next step overwrites.
    if request.planned == _end_of_fork_prompt(state, request) and all(len(blocks) == 2 for blocks in held):
        _keep_fork_state(state, request, [blocks[0] for blocks in held])
    request.kv.checkpoint_at = _next_checkpoint(state, request)


def cut(state: SchedulerState, request: Request, count: int) -> int:
    """Limit ``count`` so that the step ends at the next checkpoint."""
    checkpoint_at = request.kv.checkpoint_at
    if checkpoint_at == request.planned:
        checkpoint_at = _next_checkpoint(state, request)
    return count if checkpoint_at is None else min(count, checkpoint_at - request.planned)


def prepare(state: SchedulerState, step: StepBuilder, request: Request) -> None:
    """Set the state blocks that the next step reads and writes; keep the current state if a checkpoint is due."""
    groups, pool, planned = state.limits.groups, state.pool, request.planned
    is_new = planned == request.kv.state_start  # its blocks were set when the state was matched
    is_checkpoint = (
        planned == request.kv.checkpoint_at and not is_new and pool.num_available > _reserve(state)
    )
    is_fork_state = planned == _end_of_fork_prompt(state, request)
    if planned == request.kv.checkpoint_at:
        request.kv.checkpoint_at = _next_checkpoint(state, request)
    current: list[int] = []
    for index in groups.states:
        blocks = request.kv.held[index].blocks
        if len(blocks) == 2 and not is_new:
            pool.release([blocks.pop(0)], state.fence)
            step.blocks += (request.slot, index, 0, blocks[0])
        current.append(blocks[0])
        if is_checkpoint:
            blocks.append(pool.take())
            step.blocks += (request.slot, index, 1, blocks[1])
    if is_checkpoint:
        _register_checkpoint(state, step, request, current)
    if is_checkpoint and is_fork_state:
        _keep_fork_state(state, request, current)


def exchange(
    state: SchedulerState, step: StepBuilder, request: Request, index: int, found: list[int]
) -> None:
    """Make a request continue from a state that another request has checkpointed."""
    held = request.kv.held[index]
    state.pool.share(found)
    state.pool.release(held.blocks[:-1], state.fence)
    held.blocks = [*found, held.blocks[-1]]
    step.blocks += (request.slot, index, 0, held.blocks[0], request.slot, index, 1, held.blocks[1])


def last_checkpoint(limits: Limits, num_prompt: int) -> int:
    """Return the token count, in whole blocks, of the last reusable checkpoint of a prompt."""
    size = limits.block_size
    grain, every = min(GRAIN, size), -(-CHECKPOINT_EVERY // size) * size
    end = (num_prompt - 1) // grain * grain
    return end if not end % size else end // every * every


def num_covered(state: SchedulerState, request: Request, end: int, covered: int) -> int:
    """Return the token count up to which the states need no change: at most ``covered``, at least ``end``."""
    if any(len(request.kv.held[index].blocks) == 2 for index in state.limits.groups.states):
        return end
    return covered if request.kv.checkpoint_at is None else min(covered, request.kv.checkpoint_at)


def _next_checkpoint(state: SchedulerState, request: Request) -> int | None:
    """Return the token count of the next checkpoint after the planned tokens."""
    limits, planned = state.limits, request.planned
    wanted = [_end_of_fork_prompt(state, request)]
    if limits.prefix_caching:
        block_size = limits.block_size
        every = -(-CHECKPOINT_EVERY // block_size) * block_size
        grain = min(GRAIN, block_size)
        wanted += [(planned // every + 1) * every, (len(request.tokens) - 1) // grain * grain]
    return min((end for end in wanted if end is not None and end > planned), default=None)


def _end_of_fork_prompt(state: SchedulerState, request: Request) -> int | None:
    """Return the token count from which further choices of a request start; None if none is waiting."""
    if request.parent is not None or request.spec.params.n == 1:
        return None
    has_choices = any(other.parent is request for other in state.waiting)
    return request.num_prompt - 1 if has_choices else None


def _keep_fork_state(state: SchedulerState, request: Request, blocks: list[int]) -> None:
    if request.planned and not request.kv.fork_state_blocks:
        state.pool.share(blocks)
        request.kv.fork_state_blocks = blocks


def _register_checkpoint(
    state: SchedulerState, step: StepBuilder, request: Request, blocks: list[int]
) -> None:
    """Register a checkpoint, now or once the tokens before it are known."""
    planned, block_size = request.planned, state.limits.block_size
    if not state.limits.prefix_caching or planned % min(GRAIN, block_size):
        return
    if planned > len(request.tokens):
        state.pool.share(blocks)
        request.kv.pending_states.append((planned, blocks))
    else:
        tails = _release_tails(state, step, request) if planned % block_size else {}
        state.register_state(request, planned, blocks, tails)


def _release_tails(state: SchedulerState, step: StepBuilder, request: Request) -> dict[int, int]:
    """Leave the partial last blocks to the cache and continue in copies; return the original blocks by group."""
    position, tails = request.planned // state.limits.block_size, dict[int, int]()
    for index in state.limits.groups.tokens:
        held = request.kv.held[index]
        block = state.pool.take()
        tails[index], held.blocks[position - held.begin] = held.blocks[position - held.begin], block
        step.copy(tails[index], block)
        step.blocks += (request.slot, index, position, block)
    step.borrowed += tails.values()
    return tails


def _reserve(state: SchedulerState) -> int:
    """Return the number of blocks reserved for running requests, which take precedence over checkpoints."""
    return state.limits.watermark + len(state.running) + len(state.limits.groups.all)
