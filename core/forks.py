"""Forks: further choices of a request with n > 1 start from the first choice's prompt blocks.

They wait until the first choice has computed all but the last prompt token, and that one is planned: the first output
brings the log-probabilities of the prompt, which only the first choice computes. Then each shares the full blocks and
copies the partial block. It computes the last prompt token itself, to sample its first token with its own seed. If
the first choice ended or released needed blocks, the choice is an ordinary request and may still hit the prefix
cache.
"""

from __future__ import annotations

from quintet.core.hooks import PrefixMatch
from quintet.core.kv.groups import GroupBlocks
from quintet.core.kv.prefix import key_of
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def can_enter(state: SchedulerState, parent: Request) -> bool:
    """Delay choices while the first one computes the prompt, unless a poison-isolation trial excludes the first one."""
    if parent.status is Status.ENDED or not state.may_run(parent):
        return True
    return parent.computed >= parent.num_prompt - 1 and parent.planned >= parent.num_prompt


def match_prompt(state: SchedulerState, request: Request, parent: Request) -> PrefixMatch | None:
    """Match the prompt in the blocks of the running first choice, once they are computed."""
    num_tokens = request.num_prompt - 1
    if parent.status is not Status.RUNNING or parent.computed < num_tokens:
        return None
    num_full, remainder = divmod(num_tokens, state.limits.block_size)
    if len(request.kv.digests) < num_full:
        request.kv.digests = parent.kv.digests[:num_full]  # same tokens: hash them once
    groups = state.limits.groups
    shared = [_shared(state, request, parent, index, num_full) for index in range(len(groups.all))]
    tables = [parent.kv.held[index] for index in groups.tokens]
    if None in shared or (remainder and any(held.begin > num_full for held in tables)):
        return None
    tails = [held.blocks[num_full - held.begin] for held in tables] if remainder else []
    return PrefixMatch(
        num_tokens, [held for held in shared if held], tails, num_cached=parent.stats.num_cached
    )


def _shared(
    state: SchedulerState, request: Request, parent: Request, index: int, num_full: int
) -> GroupBlocks | None:
    """Return the blocks of a group that a choice reads from its parent; None where the parent has released some."""
    groups, held = state.limits.groups, parent.kv.held[index]
    if groups.all[index].is_state:
        kept = parent.kv.fork_state_blocks
        return GroupBlocks(0, [kept[groups.states.index(index)]]) if kept else None
    first = groups.first_block(index, request.num_prompt - 1)
    keys = [key_of(digest, index) for digest in request.kv.digests[first : min(num_full, held.begin)]]
    before = [state.pool.index.block_of.get(key) for key in keys]
    missing = max(0, min(num_full, held.begin) - first - len(keys))
    if missing or None in before:
        return None
    begin = max(first, held.begin)
    known = [block for block in before if block is not None]
    return GroupBlocks(first, known + held.blocks[begin - held.begin : max(0, num_full - held.begin)])
