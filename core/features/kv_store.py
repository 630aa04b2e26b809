"""KV of a shared store: start a request after stored blocks, where fetching is cheaper than computing.

A waiting request is first searched in the store, then fetched if that is cheaper. Meanwhile other requests pass it.
Then it enters as after a prefix cache hit. If the search takes longer than computing, it is skipped.
`quintet.core.kv.store_pool` owns the transfers.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from quintet.core.block_keys import digests_of, keys_after, match_fetched, run_of
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.prefix import reach
from quintet.core.kv.store_pool import StorePool
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """Return the feature if a store is configured."""
    return (
        None
        if setup.cache.store is None
        else Feature("kv_store", can_schedule=can_schedule, match_prefix=match_prefix)
    )


def can_schedule(state: SchedulerState, request: Request) -> bool:
    """Delay a request during its search or fetch. A poison-isolation trial waits for nothing."""
    store, request_id = state.pool.tiers.store, request.request_id
    if store is None or state.trial is not None:
        return True
    if request_id not in store.fetches.requests:
        if request_id not in store.lookups:
            _look_up(state, store, request)
        lookup = store.lookups.get(request_id)
        if lookup is not None and not lookup.is_pending:
            _ask(state, store, request)
        elif lookup is not None:
            return False
    fetch = store.fetches.requests.get(request_id)
    return fetch is None or not fetch.pending


def _look_up(state: SchedulerState, store: StorePool, request: Request) -> None:
    """Search the store for a request, if it could provide more than the device and the search is cheap enough."""
    limits = state.limits
    most = _most_blocks(state, store, request)
    num_on_device = reach(
        state.pool.index.block_of,
        digests_of(state, request, most),
        most,
        limits.groups.all,
        limits.block_size,
    )
    computing_ns = state.throughput.time_of((most - num_on_device) * limits.block_size)
    if (
        most <= max(num_on_device, _num_fetching(state, request))
        or not request.spec.params.reads_prefix_cache
        or store.is_paused
        or not store.search_cost.is_cheaper(1, computing_ns)
    ):
        store.fetches.note_no_fetch(request.request_id)
        return
    store.look_up(request.request_id, request.kv.digests[:most])


def _most_blocks(state: SchedulerState, store: StorePool, request: Request) -> int:
    """Return the number of the request's blocks in complete chunks, leaving at least one token to compute."""
    limits, runs = state.limits, store.runs
    step = runs.every if limits.groups.states else runs.num_blocks
    return (len(request.tokens) - 1) // limits.block_size // step * step


def _num_fetching(state: SchedulerState, request: Request) -> int:
    """Return the number of the request's blocks that other tiers are fetching."""
    tiers = state.pool.tiers
    requests = [
        tier.fetches.requests.get(request.request_id)
        for tier in (tiers.disk, tiers.peers)
        if tier is not None
    ]
    return (
        max((fetch.num_tokens for fetch in requests if fetch is not None), default=0)
        // state.limits.block_size
    )


def _ask(state: SchedulerState, store: StorePool, request: Request) -> None:
    """Fetch the found blocks if that is cheaper than computing; retry later when host blocks are short."""
    limits, index, request_id = state.limits, state.pool.index, request.request_id
    groups, size = limits.groups.all, limits.block_size
    most = _most_blocks(state, store, request)
    digests = digests_of(state, request, most)
    places = store.places(request_id, digests)
    known: Mapping[bytes, Any] = ChainMap[bytes, Any](index.block_of, places)
    num_on_device = max(reach(index.block_of, digests, most, groups, size), _num_fetching(state, request))
    num_reachable = reach(known, digests, most, groups, size)
    missing: list[bytes] = []
    for group in range(len(groups)):
        keys = keys_after(state, request, group, num_reachable * size)
        missing += keys[len(run_of(keys, index.block_of)) :]
    is_complete = all(map(places.__contains__, missing))
    num_runs = len({places[key][0] for key in missing if key in places})
    computing_ns = state.throughput.time_of((num_reachable - num_on_device) * size)
    if (
        store.is_paused
        or num_reachable <= num_on_device
        or not is_complete
        or not store.get_cost.is_cheaper(num_runs, computing_ns)
    ):
        store.fetches.note_no_fetch(request_id)
        return
    store.ask(request_id, missing, places, num_reachable * size, whole=not limits.groups.is_plain)


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match blocks on the device, then fetched blocks."""
    store = state.pool.tiers.store
    return None if store is None else match_fetched(state, request, store.fetches)
