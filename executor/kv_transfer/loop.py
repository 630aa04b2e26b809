"""The executor's loop side of KV back ends: passes requests from the core to them, and results back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quintet.executor.interface import StepWorker
from quintet.process.kv_publisher import address_for
from quintet.process.runtime import Process
from quintet.process.wakeup import Wakeup
from quintet.wire.codec import pack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.kv_admin import KvPins
from quintet.wire.kv_tiers import MAX_KEPT, KvTierRequests, StoredBlocks, TierResultsReady
from quintet.wire.step import Capacity, StepPlan

if TYPE_CHECKING:
    from quintet.executor.kv_transfer.back_end import BackEnd  # imports torch


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


def open_kv_loop(
    process: Process[StepPlan | KvTierRequests | KvPins], worker: StepWorker
) -> KvConnectorLoop | None:
    """Return the KV loop of a worker with back ends; None without."""
    return KvConnectorLoop(process, worker.kv_back_ends) if worker.kv_back_ends else None


class KvConnectorLoop:
    """Passes requests to the back ends, and results to the core."""

    def __init__(
        self, process: Process[StepPlan | KvTierRequests | KvPins], back_ends: Sequence[BackEnd]
    ) -> None:
        self._process = process
        self._back_ends = back_ends
        self._wakeup = Wakeup(TierResultsReady)
        process.inbox.hang(self._wakeup)
        for each in back_ends:
            each.begin(self._wakeup.ring)

    def add_capacity(self, capacity: Capacity) -> None:
        """Send the stored blocks to the core, and set the back ends' sizes in ``capacity``."""
        for each in self._back_ends:
            capacity.tiers.append(each.capacity)
            stored = each.stored()
            for begin in range(0, len(stored), MAX_KEPT):
                some = stored[begin : begin + MAX_KEPT]
                places, keys = pack_i32(place for place, _ in some), [key for _, key in some]
                self._send(StoredBlocks(capacity.executor_epoch, capacity.tables, places, keys))

    def order(self, requests: KvTierRequests) -> None:
        """Pass requests to their back end."""
        for each in self._back_ends:
            if each.tier == requests.tier:
                each.order(requests)

    def send_results(self) -> None:
        """Send the back ends' results to the core."""
        for each in self._back_ends:
            results = each.take_results()
            if results is not None:
                results.executor_epoch = self._process.me.epoch
                self._send(results)

    def reset(self) -> None:
        """Cancel requests after a reset of the tables."""
        for each in self._back_ends:
            each.reset()

    def close(self) -> None:
        """Finish queued writes within the shutdown limit, then close the back ends."""
        for each in self._back_ends:
            each.close()

    def _send(self, message: msgspec.Struct) -> None:
        self._process.peers.send(Role.CORE, self._process.me.index, message)
