"""Prefix cache: start a request after the longest cached run of full blocks that matches its first tokens.

`SchedulerState.register_blocks` registers a block once it is full, planned and its tokens are known: prompt tokens when
planned, outputs when committed. Models with states also have ends inside a block (`quintet.core.kv.prefix`): at a
request's last computed token and near the end of its prompt.
"""

from __future__ import annotations

from quintet.core.block_keys import keys_after, match_after
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.groups import GroupBlocks
from quintet.core.kv.prefix import reach, run_of
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    return Feature("prefix_cache", match_prefix=match_prefix) if setup.cache.enable_prefix_caching else None


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match the request's tokens in the cache, leaving at least one to compute: sampling needs logits."""
    if not request.spec.params.reads_prefix_cache:
        return None
    limits, block_of, num_tokens = state.limits, state.pool.index.block_of, len(request.tokens)
    block_size, groups = limits.block_size, limits.groups
    max_blocks = (num_tokens - 1) // block_size
    digests = request.hash_blocks(block_size, max_blocks)
    if groups.is_plain:
        blocks = run_of(digests[:max_blocks], block_of)
        num_cached = min(len(blocks) * block_size, request.num_prompt)
        return PrefixMatch(len(blocks) * block_size, [GroupBlocks(0, blocks)], (), num_cached, num_tokens)
    num_blocks = reach(block_of, digests, max_blocks, groups)
    found = match_after(state, request, num_blocks * block_size)
    assert found is not None, (request.request_id, num_blocks)
    found = _longest_end(state, request, found.num_tokens) or found
    num_cached = min(found.num_tokens, request.num_prompt)
    return PrefixMatch(found.num_tokens, found.shared, found.tails, num_cached, num_tokens)


def _longest_end(state: SchedulerState, request: Request, least: int) -> PrefixMatch | None:
    """Match an end after more than ``least`` tokens.

    A running request gets none, because it would have to copy blocks. Nor does one when blocks are scarce: the tails
    stay referenced until copied, in addition to the request's own blocks.
    """
    index, groups, block_size = state.pool.index, state.limits.groups, state.limits.block_size
    if not index.ends or request.status is Status.RUNNING:
        return None
    if not state.has_spare_blocks(request, len(groups.tokens)):
        return None
    most = len(request.tokens) - 1
    for num_blocks in range(most // block_size, least // block_size - 1, -1):
        before = request.kv.digests[num_blocks - 1] if num_blocks else request.salt_digest
        for length in sorted(index.ends.get(before, ()), reverse=True):
            num_tokens = num_blocks * block_size + length
            if not least < num_tokens <= most:
                continue
            (state_key,) = keys_after(state, request, groups.states[0], num_tokens)
            found = match_after(state, request, num_tokens) if state_key in index.block_of else None
            if found is not None:
                return found
    return None
