"""KV offload: keep the KV of preempted requests in host memory where copying is cheaper than recomputation.

Full blocks are copied to the host before the device reuses them. Blocks outside the prefix cache are copied at once,
cached ones when they are evicted. Groups with windows or states also save the partial last block and the states. A
resumed request shares the blocks still on the device and restores the following ones from the host, if that is still
cheaper.

Both costs are measured: `Capacity.swap_bytes_per_s` by the executor, the compute speed by `quintet.core.throughput`.
`quintet.core.kv.host_pool` owns the host blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.core.block_keys import digests_of, keys_after, run_of
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.groups import GroupBlocks
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Return the feature if host memory is configured."""
    return (
        Feature("kv_offload", on_preempt=on_preempt, match_prefix=match_prefix)
        if setup.cache.swap_bytes > 0
        else None
    )


def on_preempt(state: SchedulerState, request: Request) -> None:
    """Save as many full blocks of the request as it can resume from and the host has free blocks for.

    All planned tokens are computed before the next plan's copies. Only blocks of known tokens count: those in flight
    are drawn again.
    """
    block_size, pool = state.limits.block_size, state.pool
    if not pool.tiers.host.num_blocks or not _may_share_blocks(request):
        return
    num_full = min(request.planned, len(request.tokens) - 1) // block_size
    if not state.limits.groups.is_plain:
        _keep_groups(state, request, num_full)
        return
    if not _is_cheaper(state, num_full * block_size, 2 * num_full):
        return
    found = pool.index.block_of
    wanted = pool.tiers.host.want(request.request_id, keys_after(state, request, 0, num_full * block_size))
    for key, block in zip(wanted, request.kv.held[0].blocks, strict=False):
        if key not in found:
            pool.tiers.host.on_evict(key, block)


def _keep_groups(state: SchedulerState, request: Request, num_blocks: int) -> None:
    """Save the blocks that every group needs to resume the request; all or none."""
    pool, groups = state.pool, state.limits.groups
    num_tokens, held = _resumable_prefix(state, request, num_blocks)
    if not num_tokens:
        return
    contents: dict[bytes, int] = {}
    for index, group in enumerate(groups.all):
        keys, blocks = keys_after(state, request, index, num_tokens), held[index].blocks[-1:]
        if not group.is_state:
            skipped = groups.first_block(index, num_tokens) - held[index].begin
            if skipped < 0:
                return
            blocks = held[index].blocks[skipped : skipped + len(keys)]
        contents |= zip(keys, blocks, strict=True)
    if not _is_cheaper(state, num_tokens, 2 * len(contents)):
        return
    request.kv.num_offloaded = num_tokens
    for key in pool.tiers.host.want(request.request_id, list(contents), whole=True):
        if key not in pool.index.block_of:
            pool.tiers.host.on_evict(key, contents[key])


def _resumable_prefix(
    state: SchedulerState, request: Request, num_blocks: int
) -> tuple[int, Sequence[GroupBlocks]]:
    """Return the number of tokens to save, and their blocks.

    Usually all computed tokens, including the partial last block, since a window has released older blocks. If the
    token after a state is unknown and prefix caching is on, it is the longest cached prefix with a checkpointed
    state.
    """
    limits, planned = state.limits, request.planned
    if not limits.groups.states or request.kv.state_start < planned < len(request.tokens):
        return min(planned, len(request.tokens) - 1), request.kv.held
    if not limits.prefix_caching:
        return 0, ()
    digests, index = digests_of(state, request, num_blocks), state.pool.index
    num_blocks, held = index.longest(digests, num_blocks, limits.groups.all, limits.block_size)
    return num_blocks * limits.block_size, held


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match blocks still on the device, then blocks on the host."""
    pool, limits = state.pool, state.limits
    if request.request_id not in pool.tiers.host.keys_of:
        return None
    if not limits.groups.is_plain:
        return _source_of_groups(state, request)
    keys = pool.tiers.host.keys_of[request.request_id]
    blocks = run_of(keys, pool.index.block_of)
    restored = pool.tiers.host.fetch(request.request_id, keys[len(blocks) :])
    if not restored or not _is_cheaper(state, len(restored) * limits.block_size, len(restored)):
        return None
    num_tokens = (len(blocks) + len(restored)) * limits.block_size
    return PrefixMatch(num_tokens, [GroupBlocks(0, blocks)], restored=[restored])


def _source_of_groups(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match the blocks that every group needs, each on the device or on the host."""
    pool, limits, num_tokens = state.pool, state.limits, request.kv.num_offloaded
    shared: list[GroupBlocks] = []
    tails: list[int | None] = []
    restored: list[list[int]] = []
    for index, group in enumerate(limits.groups.all):
        keys, block_of, rest = (
            keys_after(state, request, index, num_tokens),
            pool.index.block_of,
            list[bytes](),
        )
        if num_tokens % limits.block_size and not group.is_state:
            tail = keys.pop()  # a tail on the device is only copied
            tails.append(block_of.get(tail))
            rest = [tail] if tail not in block_of else []
        blocks = run_of(keys, block_of)
        rest = keys[len(blocks) :] + rest
        restored.append(pool.tiers.host.fetch(request.request_id, rest))
        if len(restored[-1]) < len(rest):
            return None
        shared.append(
            GroupBlocks(0 if group.is_state else limits.groups.first_block(index, num_tokens), blocks)
        )
    num_restored = sum(map(len, restored))
    if not num_restored or not _is_cheaper(state, num_tokens, num_restored):
        return None
    found = PrefixMatch(num_tokens, shared, tails, restored=restored)
    return found if state.has_spare_blocks(request, len(found.known_tails)) else None


def _may_share_blocks(request: Request) -> bool:
    """Return True when the request may reuse computed blocks: the keys are those of the prefix cache."""
    return request.spec.params.reads_prefix_cache


def _is_cheaper(state: SchedulerState, num_tokens: int, num_copies: int) -> bool:
    """Return True when the copies take less time than computing the tokens once, or when neither is measured."""
    computing_ns = state.throughput.time_of(num_tokens)
    return computing_ns is None or num_copies * state.limits.block_copy_ns < computing_ns
