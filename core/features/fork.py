"""Forks: the further choices of a request with n > 1 begin from the first one's prompt.

They wait until the first choice has computed the prompt up to its last token. Then each shares the full blocks, copies
the one partly filled block (it is about to write into it), and computes the last prompt token itself, so that it draws
its first token with its own seed. A choice whose elder is gone before there was room for it, or has lost sight of what it
needs, is a request like any other: the prefix cache or the prompt itself serve it.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.group_blocks import GroupBlocks
from quintet.core.kv.prefix import key_of
from quintet.core.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Forks are always on: only requests that have a parent notice."""
    return Feature("fork", gate=gate, source=source)


def gate(state: SchedulerState, request: Request) -> bool:
    """Hold a choice back while its elder is still on its way through the prompt, unless a trial keeps the elder from it."""
    parent = request.parent
    return (
        parent is None
        or parent.status is Status.ENDED
        or parent.computed >= parent.num_prompt - 1
        or not state.may_run(parent)
    )


def source(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Find the prompt in the blocks of the elder, if it runs and has computed them."""
    parent = request.parent
    num_tokens = request.num_prompt - 1
    if parent is None or parent.status is not Status.RUNNING or parent.computed < num_tokens:
        return None
    num_full, remainder = divmod(num_tokens, state.limits.block_size)
    if len(request.digests) < num_full:
        request.digests = parent.digests[:num_full]  # the same tokens: hash them once
    groups = state.limits.groups
    shared = [_shared(state, request, parent, index, num_full) for index in range(len(groups.all))]
    tables = [parent.held[index] for index in groups.tokens]
    if None in shared or (remainder and any(held.begin > num_full for held in tables)):
        return None
    tails = [held.blocks[num_full - held.begin] for held in tables] if remainder else []
    return PrefixMatch(num_tokens, [held for held in shared if held], tails, num_cached=parent.num_cached)


def _shared(
    state: SchedulerState, request: Request, parent: Request, index: int, num_full: int
) -> GroupBlocks | None:
    """Return what a choice reads of its elder's blocks of a group; None where the elder has lost sight of it."""
    groups, held = state.limits.groups, parent.held[index]
    if groups.all[index].is_state:
        kept = parent.for_choices
        return GroupBlocks(0, [kept[groups.states.index(index)]]) if kept else None
    first = groups.first_block(index, request.num_prompt - 1)
    keys = [key_of(digest, index) for digest in request.digests[first : min(num_full, held.begin)]]
    before = [state.pool.index.block_of.get(key) for key in keys]
    missing = max(0, min(num_full, held.begin) - first - len(keys))
    if missing or None in before:
        return None
    begin = max(first, held.begin)
    known = [block for block in before if block is not None]
    return GroupBlocks(first, known + held.blocks[begin - held.begin : max(0, num_full - held.begin)])
