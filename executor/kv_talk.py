"""The executor's part in the talk with its core about blocks on disk. What is done with them is the worker's (`KvDisk`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quintet.executor.interface import KvDisk
from quintet.process.bell import Bell
from quintet.process.runtime import Process
from quintet.wire.codec import pack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.kv_disk import MAX_KEPT, DiskRang, KvKept, KvOrders
from quintet.wire.step import Capacity, StepPlan


def own_disk(index: int, config: EngineConfig) -> EngineConfig:
    """Return the configuration with the folder that is this engine's alone."""
    disk = config.cache.disk
    if disk is None:
        return config
    disk = msgspec.structs.replace(disk, folder=str(Path(disk.folder) / f"engine-{index}"))
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, disk=disk))


class KvTalk:
    """Passes orders on, and answers back."""

    def __init__(self, process: Process[StepPlan | KvOrders], disk: KvDisk) -> None:
        self._process = process
        self._disk = disk
        self._bell = Bell(DiskRang)
        process.inbox.hang(self._bell)
        disk.begin(self._bell.ring)

    def introduce(self, capacity: Capacity) -> None:
        """Tell the core what there is, and have the capacity say how much there may be."""
        disk = self._disk
        capacity.num_disk_blocks, capacity.num_staging_blocks = disk.num_places, disk.num_staging_blocks
        kept = disk.kept()
        for begin in range(0, len(kept), MAX_KEPT):
            some = kept[begin : begin + MAX_KEPT]
            places = pack_i32(place for place, _ in some)
            message = KvKept(capacity.executor_epoch, capacity.tables, places, [key for _, key in some])
            self._process.peers.send(Role.CORE, self._process.me.index, message)

    def order(self, orders: KvOrders) -> None:
        """Have orders done."""
        self._disk.order(orders)

    def answer(self) -> None:
        """Tell the core what became of them."""
        answers = self._disk.take_answers()
        if answers is not None:
            answers.executor_epoch = self._process.me.epoch
            self._process.peers.send(Role.CORE, self._process.me.index, answers)

    def reset(self) -> None:
        """Forget orders: the tables were emptied."""
        self._disk.reset()

    def close(self) -> None:
        """Let what was ordered be written, for a moment."""
        self._disk.close()
