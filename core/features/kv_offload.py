"""KV offload: what a preempted request has computed waits in host memory, where copying is cheaper than computing again.

A preempted request would be computed again from its ids; the longer it is, the dearer. So its full blocks are copied to
the host before the device gives them new content: those that nobody could find any more at once, the others, which
the prefix cache still knows, when they are evicted. When the request is resumed, what is left of it on the device is
shared and what follows comes back from the host, if that is cheaper still.

Both costs are measured ones: the executor says how fast it copies (`Capacity.swap_bytes_per_s`), and its results how
fast it computes (`quintet.core.pace`). What takes part in a copy, and when, is `quintet.core.kv.host_pool`'s.
"""

from __future__ import annotations

from itertools import takewhile

from quintet.core.hooks import Feature, Found, Setup
from quintet.core.kv.held import Held
from quintet.core.kv.prefix import extend_chain, key_of
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
    if not state.limits.groups.is_plain:
        _keep_groups(state, request, num_full)
        return
    if not _is_cheaper(state, num_full, 2 * num_full):
        return
    found = pool.index.block_of
    wanted = pool.host.want(request.request_id, _keys(state, request, 0, range(num_full)))
    for key, block in zip(wanted, request.held[0].blocks, strict=False):
        if key not in found:
            pool.host.save(key, block)


def _keep_groups(state: State, request: Request, num_blocks: int) -> None:
    """Have what every group needs of a request's beginning outlive its preemption, all of it or nothing.

    Where beginnings are shared, that is what the prefix cache knows: the longest beginning that all groups can serve, a kept
    state among it. Where they are not, what the request holds; a state is then computed again, with all before it.
    """
    limits, pool = state.limits, state.pool
    contents: dict[bytes, int] = {}
    if limits.prefix_caching:
        digests = _digests(state, request, num_blocks)
        num_blocks, shared = pool.index.longest(digests, num_blocks, limits.groups.all, limits.block_size)
    elif limits.groups.states:
        return
    else:
        shared = request.held
    for index in range(len(limits.groups.all)):
        positions, held = _positions(state, index, num_blocks), shared[index]
        if not limits.prefix_caching and positions.start < held.begin:
            return
        first = 0 if limits.prefix_caching else positions.start - held.begin
        blocks = held.blocks[first : first + len(positions)]
        contents |= zip(_keys(state, request, index, positions), blocks, strict=True)
    if not _is_cheaper(state, num_blocks, 2 * len(contents)):
        return
    request.num_kept_blocks = num_blocks
    for key in pool.host.want(request.request_id, list(contents), whole=True):
        if key not in pool.index.block_of:
            pool.host.save(key, contents[key])


def source(state: State, request: Request) -> Found | None:
    """Find what is on the device still, and behind it what is on the host."""
    pool, limits = state.pool, state.limits
    if request.request_id not in pool.host.keys_of:
        return None
    shared: list[Held] = []
    restored: list[list[int]] = []
    if limits.groups.is_plain:
        keys = pool.host.keys_of[request.request_id]
        shared.append(Held(0, _run(keys, pool.index.block_of)))
        restored.append(pool.host.longest(keys[shared[0].end :]))
        num_blocks = shared[0].end + len(restored[0])
        num_computed = len(restored[0])
    else:
        num_computed = num_blocks = request.num_kept_blocks
        for index, group in enumerate(limits.groups.all):
            positions = _positions(state, index, num_blocks)
            keys = _keys(state, request, index, positions)
            blocks = _run(keys, pool.index.block_of)
            shared.append(Held(0 if group.is_state else positions.start, blocks))
            restored.append(pool.host.longest(keys[len(blocks) :]))
            if len(blocks) + len(restored[-1]) < len(keys):
                return None
    num_restored = sum(map(len, restored))
    if not num_restored or not _is_cheaper(state, num_computed, num_restored):
        return None
    return Found(num_blocks * limits.block_size, shared, restored=restored)


def _positions(state: State, index: int, num_blocks: int) -> range:
    """Return which positions of a group a request needs that goes on behind so many blocks; of states that of the digest."""
    groups = state.limits.groups
    if groups.all[index].is_state:
        return range(max(0, num_blocks - 1), num_blocks)
    return range(groups.first_block(index, num_blocks * state.limits.block_size), num_blocks)


def _run(keys: list[bytes], block_of: dict[bytes, int]) -> list[int]:
    """Return the blocks of the first of these keys, as long as they are known."""
    blocks = map(block_of.get, keys)
    return [block for block in takewhile(lambda block: block is not None, blocks) if block is not None]


def _keys(state: State, request: Request, index: int, positions: range) -> list[bytes]:
    """Return what names the contents of some of a request's blocks of a group.

    Where beginnings are not shared (`Limits.prefix_caching`), perhaps because keys and values depend on more than the
    tokens before them, contents are the request's own.
    """
    if not state.limits.prefix_caching:
        return [b"%d/%d/%d" % (request.request_id, index, position) for position in positions]
    digests = _digests(state, request, positions.stop)
    return [key_of(digests[position], index) for position in positions]


def _digests(state: State, request: Request, num_blocks: int) -> list[bytes]:
    extend_chain(request.digests, request.salt_digest, request.tokens, state.limits.block_size, num_blocks)
    return request.digests


def _may_begin_behind_others(request: Request) -> bool:
    """Whether the request takes computed blocks at all: as for the prefix cache, whose keys name the contents."""
    return not request.params.skip_reading_prefix_cache and request.params.prompt_logprobs is None


def _is_cheaper(state: State, num_blocks: int, num_copies: int) -> bool:
    """Return whether so many copies take less time than computing so many blocks' tokens once. Unmeasured, they do."""
    computing_ns = state.pace.time_of(num_blocks * state.limits.block_size)
    return computing_ns is None or num_copies * state.limits.block_copy_ns < computing_ns
