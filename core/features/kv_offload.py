"""KV offload: what a preempted request has computed waits in host memory, where copying is cheaper than computing again.

A preempted request would be computed again from its ids; the longer it is, the dearer. So its full blocks are copied to
the host before the device gives them new content: those that nobody could find any more at once, the others, which
the prefix cache still knows, when they are evicted. When the request is resumed, what is left of it on the device is
shared and what follows comes back from the host, if that is cheaper still.

Both costs are measured ones: the executor says how fast it copies (`Capacity.swap_bytes_per_s`), and its results how
fast it computes (`quintet.core.pace`). What takes part in a copy, and when, is `quintet.core.kv.host_pool`'s.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Found, Setup
from quintet.core.kv.prefix import extend_chain
from quintet.core.request import Request
from quintet.core.state import State


def build(setup: Setup) -> Feature | None:
    """On if there is to be host memory for it."""
    return Feature("kv_offload", keep=keep, source=source) if setup.cache.swap_bytes > 0 else None


def keep(state: State, request: Request) -> None:
    """Have as many full blocks of a request as it can begin behind, and as the host has room for, outlive its preemption.

    All that plans have computed is there before the next plan copies anything; of that, only what follows from tokens
    that are known: those in flight are drawn again.
    """
    block_size, pool = state.limits.block_size, state.pool
    if not pool.host.num_blocks or not _may_begin_behind_others(request):
        return
    num_full = min(request.planned, len(request.tokens) - 1) // block_size
    if not _is_cheaper(state, num_full, num_copies=2):
        return
    found = pool.index.block_of
    wanted = pool.host.want(request.request_id, _keys(state, request, num_full))
    for key, block in zip(wanted, request.blocks, strict=False):
        if key not in found:
            pool.host.save(key, block)


def source(state: State, request: Request) -> Found | None:
    """Find what is on the device still, and behind it what is on the host."""
    pool = state.pool
    keys = pool.host.keys_of.get(request.request_id)
    if keys is None:
        return None
    blocks = pool.index.longest(keys, len(keys))
    restored = pool.host.longest(keys[len(blocks) :])
    if not restored or not _is_cheaper(state, len(restored), num_copies=1):
        return None
    num_tokens = (len(blocks) + len(restored)) * state.limits.block_size
    return Found(num_tokens, blocks, restored=restored)


def _keys(state: State, request: Request, num_blocks: int) -> list[bytes]:
    """Return what names the contents of a request's first blocks.

    Where beginnings are not shared (`Limits.prefix_caching`), perhaps because keys and values depend on more than the
    tokens before them, contents are the request's own.
    """
    if not state.limits.prefix_caching:
        return [b"%d/%d" % (request.request_id, position) for position in range(num_blocks)]
    block_size = state.limits.block_size
    extend_chain(request.digests, request.salt_digest, request.tokens, block_size, num_blocks)
    return request.digests[:num_blocks]


def _may_begin_behind_others(request: Request) -> bool:
    """Whether the request takes computed blocks at all: as for the prefix cache, whose keys name the contents."""
    return not request.params.skip_reading_prefix_cache and request.params.prompt_logprobs is None


def _is_cheaper(state: State, num_blocks: int, num_copies: int) -> bool:
    """Return whether copying blocks so often takes less time than computing them once. Unmeasured, it does."""
    computing_ns = state.pace.time_of(num_blocks * state.limits.block_size)
    return computing_ns is None or num_copies * num_blocks * state.limits.block_copy_ns < computing_ns
