"""Client of the executor's KV tiers: builds transfer requests for disk, peers and store, and applies the results.

Policy is in `quintet.core.kv.disk_pool` and `quintet.core.features`.
"""

from __future__ import annotations

from quintet.core import recurrent_state
from quintet.core.counters import Counters
from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.store_pool import StoreChunks, StorePool
from quintet.core.kv.tiers import Tiers
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.wire.codec import unpack_i32
from quintet.wire.config import CacheConfig
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, StoredBlocks
from quintet.wire.step import Capacity


class KvTierClient:
    """Collects an executor's disk contents until its `Capacity` arrives."""

    def __init__(self) -> None:
        self._kept: list[StoredBlocks] = []

    def add_stored(self, message: StoredBlocks) -> None:
        """Add a part of the disk's contents."""
        about = message.executor_epoch, message.tables
        self._kept = [kept for kept in self._kept if (kept.executor_epoch, kept.tables) == about]
        self._kept.append(message)

    def tiers(self, capacity: Capacity, limits: Limits, cache: CacheConfig) -> Tiers:
        """Return the tiers of an executor's tables, with the disk contents found at start."""
        peers = None
        if capacity.num_peer_blocks is not None:
            first = capacity.num_host_blocks + capacity.num_staging_blocks
            peers = PeerPool(first, capacity.num_peer_blocks)
        store = None
        if capacity.num_store_blocks and cache.store is not None:
            first = capacity.num_host_blocks + capacity.num_staging_blocks + (capacity.num_peer_blocks or 0)
            runs = StoreChunks.of(limits.groups, limits.block_size, recurrent_state.CHECKPOINT_EVERY)
            max_putting = cache.store.waiting_bytes // limits.block_bytes
            store = StorePool(runs, first, capacity.num_store_blocks, max_putting)
        if not capacity.num_disk_blocks:
            return Tiers(capacity.num_host_blocks, None, peers, store)
        pool = DiskPool(capacity.num_disk_blocks, capacity.num_host_blocks, capacity.num_staging_blocks)
        for kept in self._kept:
            if (kept.executor_epoch, kept.tables) == (capacity.executor_epoch, capacity.tables):
                for place, key in zip(unpack_i32(kept.places), kept.keys, strict=True):
                    pool.hold(key, place)
        self._kept.clear()
        return Tiers(capacity.num_host_blocks, pool, peers, store)

    def orders(self, state: SchedulerState | None, tables: int, now_ns: int) -> KvTierRequests | None:
        """Return the transfers to send, or None. Called before each plan is made, and after the last one was sent."""
        if state is None:
            return None
        tiers, orders, taken_ns = state.pool.tiers, KvTierRequests(tables), now_ns + _busy_ns(state)
        disk, peers, store = tiers.disk, tiers.peers, tiers.store
        if disk is not None:
            self._queue_stores(state, disk)
            disk.add_orders(orders, taken_ns)
        if peers is not None:
            peers.add_orders(orders, taken_ns)
            state.counters.peer_offered_blocks += len(orders.offer_keys)
        if store is not None:
            orders.store = store.orders(state.pool.index.block_of, taken_ns)
        return None if orders.is_empty else orders

    @staticmethod
    def _queue_stores(state: SchedulerState, disk: DiskPool) -> None:
        registered, block_of = state.pool.index.registered, state.pool.index.block_of
        if registered:
            for key, block in registered.items():
                if block_of.get(key) == block:  # otherwise the wrong content would be stored under this key
                    disk.queue_store(key, block)
            registered.clear()

    def answer(self, state: SchedulerState | None, answers: KvTierResults) -> None:
        """Apply the results of transfers."""
        if state is None:
            return
        tiers = state.pool.tiers
        if tiers.disk is not None:
            tiers.disk.answer(answers)
        if tiers.peers is not None:
            tiers.peers.answer(answers)
        if tiers.store is not None and answers.store is not None:
            tiers.store.answer(answers.store)
        _count(state.counters, answers, state.limits.block_bytes)


def _busy_ns(state: SchedulerState) -> int:
    """Return the time for which a computing executor may not process transfers; it extends the timeouts."""
    if not state.in_flight:
        return 0
    num_tokens = sum(flight.num_tokens for flight in state.in_flight)
    return state.throughput.time_of(num_tokens + state.limits.max_batched) or 0


def _count(counters: Counters, answers: KvTierResults, block_bytes: int) -> None:
    num_fetched, num_pulled = len(answers.fetched) // 4, len(answers.pulled) // 4
    counters.disk_stored_blocks += len(answers.stored)
    counters.disk_unstored_blocks += len(answers.unstored)
    counters.disk_fetched_blocks += num_fetched
    counters.disk_missed_blocks += len(answers.missed) // 4
    counters.disk_stored_bytes += len(answers.stored) * block_bytes
    counters.disk_fetched_bytes += num_fetched * block_bytes
    counters.peer_fetched_blocks += num_pulled
    counters.peer_missed_blocks += len(answers.lacking) // 4
    counters.peer_fetched_bytes += num_pulled * block_bytes
    if answers.store is not None:
        store, num_fetched = answers.store, len(answers.store.fetched) // 4
        counters.store_kept_runs += len(store.kept)
        counters.store_unkept_runs += len(store.unkept)
        counters.store_fetched_blocks += num_fetched
        counters.store_missed_blocks += len(store.missed) // 4
        counters.store_fetched_bytes += num_fetched * block_bytes
