"""The core's part in the talk with the executor about blocks on disk and of peers: what is there, what to do, what became of it.

Decides nothing: `quintet.core.kv.disk_pool` and `quintet.core.features` do.
"""

from __future__ import annotations

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.tiers import Tiers
from quintet.core.state import State
from quintet.wire.codec import unpack_i32
from quintet.wire.kv_disk import KvAnswers, KvKept, KvOrders
from quintet.wire.step import Capacity


class DiskTalk:
    """Remembers what an executor has told of its disk until it tells its capacity."""

    def __init__(self) -> None:
        self._kept: list[KvKept] = []

    def hear_kept(self, message: KvKept) -> None:
        """Take note of some of what the disk holds."""
        about = message.executor_epoch, message.tables
        self._kept = [kept for kept in self._kept if (kept.executor_epoch, kept.tables) == about]
        self._kept.append(message)

    def tiers(self, capacity: Capacity) -> Tiers:
        """Return the tiers of an executor's tables, with what is on disk already."""
        peers = None
        if capacity.num_peer_blocks is not None:
            first = capacity.num_host_blocks + capacity.num_staging_blocks
            peers = PeerPool(first, capacity.num_peer_blocks)
        if not capacity.num_disk_blocks:
            return Tiers(capacity.num_host_blocks, None, peers)
        pool = DiskPool(capacity.num_disk_blocks, capacity.num_host_blocks, capacity.num_staging_blocks)
        for kept in self._kept:
            if (kept.executor_epoch, kept.tables) == (capacity.executor_epoch, capacity.tables):
                for place, key in zip(unpack_i32(kept.places), kept.keys, strict=True):
                    pool.hold(key, place)
        self._kept.clear()
        return Tiers(capacity.num_host_blocks, pool, peers)

    def orders(self, state: State | None, tables: int, now_ns: int) -> KvOrders | None:
        """Return what the executor is to do, if anything. Asked before each plan is made, and after the last one was sent."""
        if state is None:
            return None
        disk, peers, orders = state.pool.tiers.disk, state.pool.tiers.peers, KvOrders(tables)
        if disk is not None:
            self._note_news(state, disk)
            disk.add_orders(orders, now_ns)
        if peers is not None:
            peers.add_orders(orders, now_ns)
            state.counters.peer_offered_blocks += len(orders.offer_keys)
        return None if orders.is_empty else orders

    @staticmethod
    def _note_news(state: State, disk: DiskPool) -> None:
        news, block_of = state.pool.index.news, state.pool.index.block_of
        if news:
            for key, block in news.items():
                if block_of.get(key) == block:  # otherwise other bits would be kept under its name, for good
                    disk.stand(key, block)
            news.clear()

    def answer(self, state: State | None, answers: KvAnswers) -> None:
        """Apply what became of orders."""
        if state is None:
            return
        disk, peers = state.pool.tiers.disk, state.pool.tiers.peers
        if disk is not None:
            disk.answer(answers)
        if peers is not None:
            peers.answer(answers)
        counters, block_bytes = state.counters, state.limits.block_bytes
        counters.disk_stored_blocks += len(answers.stored)
        counters.disk_unstored_blocks += len(answers.unstored)
        counters.disk_fetched_blocks += len(answers.fetched) // 4
        counters.disk_missed_blocks += len(answers.missed) // 4
        counters.disk_stored_bytes += len(answers.stored) * block_bytes
        counters.disk_fetched_bytes += len(answers.fetched) // 4 * block_bytes
        counters.peer_fetched_blocks += len(answers.pulled) // 4
        counters.peer_missed_blocks += len(answers.lacking) // 4
        counters.peer_fetched_bytes += len(answers.pulled) // 4 * block_bytes
