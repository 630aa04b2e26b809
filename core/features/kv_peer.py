"""KV of other servers: start a request after the prompt blocks that a peer has computed.

A waiting request that names a peer is looked up once, before it first runs. Blocks that the device lacks and the peer
offers are fetched; meanwhile other requests pass. Then it enters as after a prefix cache hit. It also waits for free
host blocks, because recomputation would defeat the transfer. Missing blocks are computed. `quintet.core.commit`
is the sending side.
"""

from __future__ import annotations

from quintet.core.block_keys import digests_of, keys_after, match_fetched, run_of
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.prefix import reach
from quintet.core.recurrent_state import last_checkpoint
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState
from quintet.wire.request import KvTransfer


def build(setup: Setup) -> Feature | None:
    """Return the feature if peers are configured."""
    return (
        None
        if setup.cache.peers is None
        else Feature("kv_peer", can_schedule=can_schedule, match_prefix=match_prefix)
    )


def can_schedule(state: SchedulerState, request: Request) -> bool:
    """Delay a request while blocks are being fetched for it. A poison-isolation trial waits for nothing."""
    peers, kv_transfer = state.pool.tiers.peers, request.spec.kv_transfer
    if peers is None or kv_transfer is None or not kv_transfer.peer or state.trial is not None:
        return True
    fetch = peers.fetches.requests.get(request.request_id)
    if fetch is None and request.stats.scheduled_ns is None and request.parent is None:
        if not _ask(state, peers, request, kv_transfer):
            return not peers.fetches.frees_host_blocks
        fetch = peers.fetches.requests.get(request.request_id)
    return fetch is None or not fetch.pending


def _ask(state: SchedulerState, peers: PeerPool, request: Request, kv_transfer: KvTransfer) -> bool:
    """Fetch the blocks that the peer has for a request. Return False when host blocks were short."""
    limits, index = state.limits, state.pool.index
    groups, size = limits.groups.all, limits.block_size
    num_reachable = min((len(request.tokens) - 1) // size, kv_transfer.num_blocks)
    if limits.groups.states:
        num_reachable = min(num_reachable, last_checkpoint(limits, request.num_prompt) // size)
    num_on_device = reach(
        index.block_of, digests_of(state, request, num_reachable), num_reachable, groups, size
    )
    if num_reachable <= num_on_device or not request.spec.params.reads_prefix_cache:
        peers.fetches.note_no_fetch(request.request_id)
        return True
    if not peers.may_ask(request.rank):
        return False
    missing: list[bytes] = []
    for group in range(len(groups)):
        keys = keys_after(state, request, group, num_reachable * size)
        missing += keys[len(run_of(keys, index.block_of)) :]
    whole = not limits.groups.is_plain or peers.fetches.frees_host_blocks
    request_id, rank = request.request_id, request.rank
    return peers.ask(request_id, rank, kv_transfer.peer, missing, num_reachable * size, whole=whole)


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match blocks on the device, then fetched blocks."""
    peers = state.pool.tiers.peers
    return None if peers is None else match_fetched(state, request, peers.fetches)
