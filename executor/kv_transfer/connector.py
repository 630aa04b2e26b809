"""KV connector, device half: the configured back ends of a worker, and their staging blocks in host memory.

Host blocks are numbered consecutively: first those of swap space, then the staging blocks of each back end.

The executor's loop imports this module before torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quintet.process.own_files import open_own
from quintet.process.wakeup import Wakeup
from quintet.wire.config import EngineConfig, KvDiskConfig, KvPeersConfig, KvStoreConfig
from quintet.wire.ids import Role
from quintet.wire.kv_events import address_for
from quintet.wire.kv_tiers import MAX_KEPT, KvPins, KvTierRequests, KvTierResults, TierResultsReady
from quintet.wire.step import Capacity, StepPlan

if TYPE_CHECKING:
    from quintet.executor.kv_transfer.back_end import BackEnd
    from quintet.executor.kv_transfer.block_bytes import WholeBlocks
    from quintet.process.runtime import Process

log = logging.getLogger(__name__)

OpenBackEnd = Callable[["WholeBlocks", range, Any, EngineConfig, str], "BackEnd"]
"""Open a back end: KV blocks, numbers of its staging blocks, its section, the configuration, a model runner's name.

Raises `ConfigError` if it cannot be opened.
"""

BACK_ENDS: dict[type[msgspec.Struct], str] = {
    KvDiskConfig: "quintet.executor.kv_transfer.disk.back_end:open_disk",
    KvPeersConfig: "quintet.executor.kv_transfer.peers.back_end:open_peers",
    KvStoreConfig: "quintet.executor.kv_transfer.store.back_end:open_store",
}
"""Section -> import string of the back end's `OpenBackEnd`. `quintet.core.kv.tiers` has the core halves."""


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


def without_failed_disk(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a restarted executor: without the disk if its files cannot be opened and read any more."""
    disk = config.cache.disk
    if disk is None:
        return config
    try:
        for name in os.listdir(disk.folder):
            file = open_own(str(Path(disk.folder) / name), os.O_RDWR)
            try:
                os.pread(file, 1, 0)
            finally:
                os.close(file)
    except FileNotFoundError:
        return config  # created again
    except OSError as error:
        log.error("KV on disk is off until the next start: %s: %s", disk.folder, error.strerror)
        return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, disk=None))
    return config


class KvConnector:
    """Copies fetched blocks for the worker, and passes requests and results between core and back ends for the loop."""

    def __init__(
        self,
        open_blocks: Callable[[], WholeBlocks],
        config: EngineConfig,
        runner: str,
        num_swap_blocks: int,
        swap_in: Callable[[bytes], None],
    ) -> None:
        """open_blocks: called if a back end is configured. runner: name of the model runner.

        num_swap_blocks, swap_in: of swap space; see `StepPlan.swaps_in`. Raises `ConfigError` if a back end cannot be
        opened.
        """
        self._num_swap_blocks, self._swap_in = num_swap_blocks, swap_in
        self.back_ends: list[BackEnd] = []
        self._process: Process[StepPlan | KvTierRequests | KvPins] | None = None
        if not config.cache.remote_tiers:
            return
        blocks, first = open_blocks(), num_swap_blocks
        for section in config.cache.remote_tiers:
            open_back_end: OpenBackEnd = resolve_name(BACK_ENDS[type(section)])
            end = first + config.model.kv.num_offloaded_blocks(section.staging_bytes)
            self.back_ends.append(open_back_end(blocks, range(first, end), section, config, runner))
            first = end

    def copy_in(self, swaps: bytes) -> None:
        """Copy from host blocks, of swap space or staging; see `StepPlan.swaps_in`."""
        if not self.back_ends:
            self._swap_in(swaps)
            return
        pairs = np.frombuffer(swaps, np.int32).reshape(-1, 2)
        host = pairs[:, 1]
        from_swap = host < self._num_swap_blocks
        if from_swap.any():
            self._swap_in(pairs[from_swap].tobytes())
        for each in self.back_ends:
            is_own = (each.host_blocks.start <= host) & (host < each.host_blocks.stop)
            if is_own.any():
                each.copy_in(pairs[is_own, 0], host[is_own])

    # --- the loop's side ---

    def begin(self, process: Process[StepPlan | KvTierRequests | KvPins]) -> None:
        """Start the back ends. Their results wake the process with `TierResultsReady`."""
        self._process = process
        if self.back_ends:
            wakeup = Wakeup(TierResultsReady)
            process.inbox.add_wakeup(wakeup)
            for each in self.back_ends:
                each.begin(wakeup.notify)

    def add_capacity(self, capacity: Capacity) -> None:
        """Send the stored blocks to the core, and set the back ends' sizes in ``capacity``."""
        about = capacity.executor_epoch, capacity.tables_epoch
        for each in self.back_ends:
            capacity.tiers.append(each.capacity)
            stored = each.stored()
            for begin in range(0, len(stored), MAX_KEPT):
                self._send(KvTierResults(*about, each.tier, stored[begin : begin + MAX_KEPT]))

    def order(self, requests: KvTierRequests) -> None:
        for each in self.back_ends:
            if each.tier == requests.tier:
                each.order(requests)

    def send_results(self) -> None:
        for each in self.back_ends:
            results = each.take_results()
            if results is not None and self._process is not None:
                results.executor_epoch = self._process.me.epoch
                self._send(results)

    def reset(self) -> None:
        """Cancel requests after a reset of the tables."""
        for each in self.back_ends:
            each.reset()

    def close(self) -> None:
        """Finish queued writes within the shutdown limit, then close the back ends."""
        for each in self.back_ends:
            each.close()

    def _send(self, message: msgspec.Struct) -> None:
        assert self._process is not None, "not started"
        self._process.peers.send(Role.CORE, self._process.me.index, message)
