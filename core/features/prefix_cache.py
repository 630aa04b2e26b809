"""Prefix cache: start a request after the longest cached run of full blocks that matches its first tokens.

`SchedulerState.register_blocks` registers a block once it is full, planned and its tokens are known: prompt tokens when
planned, outputs when committed. Models with states also have ends inside a block (`quintet.core.kv.prefix`): at a
request's last computed token and near the end of its prompt.
"""

from __future__ import annotations

from dataclasses import replace

from quintet.core.block_keys import match_after
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    return Feature("prefix_cache", match_prefix=match_prefix) if setup.cache.enable_prefix_caching else None


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match the request's tokens in the cache, leaving at least one to compute: sampling needs logits."""
    if not request.spec.params.reads_prefix_cache:
        return None
    block_size = state.limits.block_size
    num_tokens = len(request.tokens)
    max_blocks = (num_tokens - 1) // block_size
    digests, groups = request.hash_blocks(block_size, max_blocks), state.limits.groups.all
    num_blocks, shared = state.pool.index.longest(digests, max_blocks, groups, block_size)
    num_found = num_blocks * block_size
    end = _longest_end(state, request, num_found)
    if end is None:
        return PrefixMatch(
            num_found, shared, num_cached=min(num_found, request.num_prompt), num_queried=num_tokens
        )
    num_cached = min(end.num_tokens, request.num_prompt)
    return replace(end, num_cached=num_cached, num_queried=num_tokens)


def _longest_end(state: SchedulerState, request: Request, least: int) -> PrefixMatch | None:
    """Match an end after more than ``least`` tokens.

    A running request gets none, because it would have to copy blocks. Nor does one when blocks are scarce: the tails
    stay referenced until copied, in addition to the request's own blocks.
    """
    limits, index, tokens = state.limits, state.pool.index, request.tokens
    if not index.ends or request.status is Status.RUNNING:
        return None
    groups, block_size, most = limits.groups, limits.block_size, len(tokens) - 1
    if not state.has_spare_blocks(request, len(groups.tokens)):
        return None
    for num_blocks in range(most // block_size, least // block_size - 1, -1):
        before = request.kv.digests[num_blocks - 1] if num_blocks else request.salt_digest
        if before not in index.ends:
            continue
        begin = num_blocks * block_size
        longest = min(block_size - 1, most - begin)
        length = index.longest_end(before, tokens, begin, longest, groups.all, request.embeds)
        if not length or begin + length <= least:
            continue
        found = match_after(state, request, begin + length)
        if found is not None:
            return found
    return None
