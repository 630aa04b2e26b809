"""The executor's loop side of KV tiers: passes requests from the core to disk, peers and store, and results back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quintet.executor.interface import KvDisk, KvTierWorker, StepWorker
from quintet.process.kv_publisher import address_for
from quintet.process.runtime import Process
from quintet.process.wakeup import Wakeup
from quintet.wire.codec import pack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.kv_admin import KvPins
from quintet.wire.kv_tiers import MAX_KEPT, DiskResultsReady, KvTierRequests, StoredBlocks
from quintet.wire.step import Capacity, StepPlan


def with_engine_paths(index: int, config: EngineConfig) -> EngineConfig:
    """Return the configuration with this engine's own disk folder and peer port."""
    disk, peers = config.cache.disk, config.cache.peers
    if disk is not None:
        disk = msgspec.structs.replace(disk, folder=str(Path(disk.folder) / f"engine-{index}"))
    if peers is not None and peers.listen:
        peers = msgspec.structs.replace(peers, listen=address_for(peers.listen, index))
    return msgspec.structs.replace(
        config, cache=msgspec.structs.replace(config.cache, disk=disk, peers=peers)
    )


def open_kv_connector_loop(
    process: Process[StepPlan | KvTierRequests | KvPins], worker: StepWorker
) -> KvConnectorLoop | None:
    """Return the KV loop of a worker with KV tiers; None without tiers."""
    if worker.kv_disk is None and worker.kv_peers is None and worker.kv_store is None:
        return None
    return KvConnectorLoop(process, worker.kv_disk, worker.kv_peers, worker.kv_store)


class KvConnectorLoop:
    """Passes requests to the tiers, and results to the core."""

    def __init__(
        self,
        process: Process[StepPlan | KvTierRequests | KvPins],
        disk: KvDisk | None,
        peers: KvTierWorker | None,
        store: KvTierWorker | None = None,
    ) -> None:
        self._process = process
        self._disk = disk
        self._peers = peers
        self._store = store
        self._all: tuple[KvTierWorker, ...] = tuple(each for each in (disk, peers, store) if each is not None)
        self._wakeup = Wakeup(DiskResultsReady)
        process.inbox.hang(self._wakeup)
        for each in self._all:
            each.begin(self._wakeup.ring)

    def add_capacity(self, capacity: Capacity) -> None:
        """Send the stored blocks to the core, and set the tiers' sizes in ``capacity``."""
        if self._peers is not None:
            capacity.num_peer_blocks = self._peers.num_staging_blocks
        if self._store is not None:
            capacity.num_store_blocks = self._store.num_staging_blocks
        if self._disk is not None:
            self._send_stored(self._disk, capacity)

    def _send_stored(self, disk: KvDisk, capacity: Capacity) -> None:
        capacity.num_disk_blocks, capacity.num_staging_blocks = disk.num_places, disk.num_staging_blocks
        kept = disk.kept()
        for begin in range(0, len(kept), MAX_KEPT):
            some = kept[begin : begin + MAX_KEPT]
            places = pack_i32(place for place, _ in some)
            message = StoredBlocks(capacity.executor_epoch, capacity.tables, places, [key for _, key in some])
            self._process.peers.send(Role.CORE, self._process.me.index, message)

    def order(self, orders: KvTierRequests) -> None:
        """Pass requests to the tiers."""
        has_disk_requests = orders.store_keys or orders.fetch_keys or orders.drop_keys or orders.files
        if self._disk is not None and has_disk_requests:
            self._disk.order(orders)
        if self._peers is not None and (orders.offer_keys or orders.pulls):
            self._peers.order(orders)
        if self._store is not None and orders.store is not None:
            self._store.order(orders)

    def answer(self) -> None:
        """Send the tiers' results to the core."""
        for each in self._all:
            results = each.take_results()
            if results is not None:
                results.executor_epoch = self._process.me.epoch
                self._process.peers.send(Role.CORE, self._process.me.index, results)

    def reset(self) -> None:
        """Cancel requests after a reset of the tables."""
        for each in self._all:
            each.reset()

    def close(self) -> None:
        """Finish queued writes within the shutdown limit, then close the tiers."""
        for each in self._all:
            each.close()
