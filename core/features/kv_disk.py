"""KV on disk: start a request after blocks on disk, where reading is cheaper than computing.

A waiting request is looked up once. Blocks that the device lacks and the disk has are fetched; meanwhile other
requests pass. Then it enters as after a prefix cache hit. `quintet.core.kv.disk_pool` decides what is stored: every
full block that becomes reusable, and states after full blocks.
"""

from __future__ import annotations

from collections import ChainMap

from quintet.core.block_keys import keys_after, match_fetched, run_of
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.prefix import extend_chain, reach
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Return the feature if a disk tier is configured."""
    return (
        None
        if setup.cache.disk is None
        else Feature("kv_disk", can_schedule=can_schedule, match_prefix=match_prefix)
    )


def can_schedule(state: SchedulerState, request: Request) -> bool:
    """Delay a request while blocks are being fetched for it. A poison-isolation trial waits for nothing."""
    disk = state.pool.tiers.disk
    if disk is None or state.trial is not None:
        return True
    fetch = disk.fetches.requests.get(request.request_id)
    if fetch is None:
        _ask(state, disk, request)
        fetch = disk.fetches.requests.get(request.request_id)
    return fetch is None or not fetch.pending


def _ask(state: SchedulerState, disk: DiskPool, request: Request) -> None:
    """Fetch the blocks that the disk has for a request if that is cheaper; retry later when host blocks are short."""
    limits, index = state.limits, state.pool.index
    max_blocks = (len(request.tokens) - 1) // limits.block_size
    if not request.spec.params.reads_prefix_cache or not disk.place_of or not max_blocks:
        disk.fetches.note_no_fetch(request.request_id)
        return
    digests, groups, size = request.kv.digests, limits.groups.all, limits.block_size
    extend_chain(digests, request.salt_digest, request.tokens, size, max_blocks)
    num_on_device = reach(index.block_of, digests, max_blocks, groups, size)
    num_reachable = reach(ChainMap(index.block_of, disk.place_of), digests, max_blocks, groups, size)
    missing: list[bytes] = []
    for group in range(len(groups)):
        keys = keys_after(state, request, group, num_reachable * size)
        disk.use(keys)
        missing += keys[len(run_of(keys, index.block_of)) :]
    is_complete = all(map(disk.place_of.__contains__, missing))
    computing_ns = state.throughput.time_of((num_reachable - num_on_device) * size)
    if (
        num_reachable <= num_on_device
        or not is_complete
        or not disk.cost.is_cheaper(len(missing), computing_ns)
    ):
        disk.fetches.note_no_fetch(request.request_id)
        return
    disk.ask(request.request_id, missing, num_reachable * size, whole=not limits.groups.is_plain)


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match blocks on the device, then fetched blocks."""
    disk = state.pool.tiers.disk
    return None if disk is None else match_fetched(state, request, disk.fetches)
