"""KV that other servers share: a request begins behind what a store has of its tokens, where fetching is cheaper than computing.

A waiting request is looked up in two turns: what is there of its beginning, and, if that is worth it, bring it. Meanwhile others
pass it; then it enters behind it, as behind a hit in the prefix cache. Where looking takes longer than computing would, it does
not look. What is kept, and when, is `quintet.core.kv.store_pool`'s.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from quintet.core.block_keys import digests_of, found_behind, keys_behind, run_of
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.prefix import reach
from quintet.core.kv.store_pool import StorePool
from quintet.core.request import Request
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    """On if there is a store."""
    return None if setup.cache.store is None else Feature("kv_store", gate=gate, source=source)


def gate(state: SchedulerState, request: Request) -> bool:
    """Hold a request back while what it can begin behind is looked for, or on its way. In a trial nobody waits for anything."""
    store, request_id = state.pool.tiers.store, request.request_id
    if store is None or state.trial is not None:
        return True
    if request_id not in store.fetches.wishes:
        if request_id not in store.lookups:
            _look_up(state, store, request)
        lookup = store.lookups.get(request_id)
        if lookup is not None and not lookup.is_pending:
            _ask(state, store, request)
        elif lookup is not None:
            return False
    wish = store.fetches.wishes.get(request_id)
    return wish is None or not wish.pending


def _look_up(state: SchedulerState, store: StorePool, request: Request) -> None:
    """Look for what a request could begin behind, if that is more than what is here already and looking is worth it."""
    limits = state.limits
    most = _most_blocks(state, store, request)
    here = reach(
        state.pool.index.block_of,
        digests_of(state, request, most),
        most,
        limits.groups.all,
        limits.block_size,
    )
    computing_ns = state.pace.time_of((most - here) * limits.block_size)
    if (
        most <= max(here, _coming(state, request))
        or not request.params.reads_prefix_cache
        or store.is_silent
        or not store.search_cost.is_cheaper(1, computing_ns)
    ):
        store.fetches.wish_nothing(request.request_id)
        return
    store.look_up(request.request_id, request.digests[:most])


def _most_blocks(state: SchedulerState, store: StorePool, request: Request) -> int:
    """Return how many blocks of a request whole runs can have, and leave it a token to compute."""
    limits, runs = state.limits, store.runs
    step = runs.every if limits.groups.states else runs.num_blocks
    return (len(request.tokens) - 1) // limits.block_size // step * step


def _coming(state: SchedulerState, request: Request) -> int:
    """Return behind how many blocks a request begins by what other tiers bring it."""
    tiers = state.pool.tiers
    wishes = [
        tier.fetches.wishes.get(request.request_id) for tier in (tiers.disk, tiers.peers) if tier is not None
    ]
    return max((wish.num_tokens for wish in wishes if wish is not None), default=0) // state.limits.block_size


def _ask(state: SchedulerState, store: StorePool, request: Request) -> None:
    """Have fetched what was found, if that is worth it and there is room; where there is none now, later."""
    limits, index, request_id = state.limits, state.pool.index, request.request_id
    groups, size = limits.groups.all, limits.block_size
    most = _most_blocks(state, store, request)
    digests = digests_of(state, request, most)
    places = store.places(request_id, digests)
    known: Mapping[bytes, Any] = ChainMap[bytes, Any](index.block_of, places)
    here = max(reach(index.block_of, digests, most, groups, size), _coming(state, request))
    there = reach(known, digests, most, groups, size)
    missing: list[bytes] = []
    for group in range(len(groups)):
        keys = keys_behind(state, request, group, there * size)
        missing += keys[len(run_of(keys, index.block_of)) :]
    is_there = all(map(places.__contains__, missing))
    num_runs = len({places[key][0] for key in missing if key in places})
    computing_ns = state.pace.time_of((there - here) * size)
    if (
        store.is_silent
        or there <= here
        or not is_there
        or not store.get_cost.is_cheaper(num_runs, computing_ns)
    ):
        store.fetches.wish_nothing(request_id)
        return
    store.ask(request_id, missing, places, there * size, whole=not limits.groups.is_plain)


def source(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Find what is on the device, and behind it what was fetched."""
    store = state.pool.tiers.store
    return None if store is None else found_behind(state, request, store.fetches)
