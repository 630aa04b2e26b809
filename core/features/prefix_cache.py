"""Prefix cache: begin a request behind the longest run of full blocks that already holds its first tokens.

Finding is here; a block is made findable by `State.publish` once it is full, computed in some plan, and its tokens are
known: those of a prompt when they are planned, those that were drawn when they come back.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Found, Setup
from quintet.core.kv.prefix import extend_chain
from quintet.core.request import Request
from quintet.core.state import State


def build(setup: Setup) -> Feature | None:
    """On unless the configuration switches it off."""
    return Feature("prefix_cache", source=source) if setup.cache.enable_prefix_caching else None


def source(state: State, request: Request) -> Found | None:
    """Find the request's tokens in the cache, leaving at least one to compute: a step must have something to draw from."""
    params = request.params
    if params.skip_reading_prefix_cache or params.prompt_logprobs is not None:
        return None
    block_size = state.limits.block_size
    num_tokens = len(request.tokens)
    max_blocks = (num_tokens - 1) // block_size
    extend_chain(request.digests, request.salt_digest, request.tokens, block_size, max_blocks)
    groups = state.limits.groups.all
    num_blocks, shared = state.pool.index.longest(request.digests, max_blocks, groups, block_size)
    num_found = num_blocks * block_size
    return Found(num_found, shared, num_cached=min(num_found, request.num_prompt), num_queried=num_tokens)
