"""KV publication: offer the full prompt blocks of an ended request to other servers (disaggregated prefill)."""

from __future__ import annotations

from quintet.core.block_keys import digests_of, keys_after, run_of
from quintet.core.kv.prefix import reach
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def offer(state: SchedulerState, request: Request) -> None:
    """Offer the full prompt blocks of a request that has just ended, while the device still has them."""
    peers, handover = state.pool.tiers.peers, request.handover
    if peers is None or handover is None or not handover.offers:
        return
    limits, index = state.limits, state.pool.index
    groups, size = limits.groups.all, limits.block_size
    most = request.num_prompt // size
    num_blocks = reach(index.block_of, digests_of(state, request, most), most, groups, size)
    for group in range(len(groups)):
        keys = keys_after(state, request, group, num_blocks * size)
        peers.offer(dict(zip(keys, run_of(keys, index.block_of), strict=True)))
