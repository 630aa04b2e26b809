"""Where blocks of KV memory are beside the device and swap space: on disk, at other servers, in a shared store.

What is fetched from there comes to host blocks, numbered behind those of swap space: one place after the other.
"""

from __future__ import annotations

import numpy as np

from quintet.executor.disk.boot import open_kv_disk
from quintet.executor.features.kv_offload import HostBlocks
from quintet.executor.interface import KvElsewhere
from quintet.executor.parallel.host_blocks import HostBlocksOfAllRanks
from quintet.executor.runner import Runner
from quintet.executor.store.boot import open_kv_store
from quintet.wire.config import EngineConfig


class Elsewhere:
    """All places there are."""

    def __init__(
        self, runner: Runner, config: EngineConfig, host_blocks: HostBlocks | HostBlocksOfAllRanks
    ) -> None:
        """host_blocks: swap space, whose numbers come first. Raises `ConfigError` where a place cannot be opened."""
        self._host_blocks = host_blocks
        self._num_host_blocks = host_blocks.num_blocks
        self._places: list[tuple[int, int, KvElsewhere]] = []
        """Numbers of host blocks, from the first up to another, and what fetches into them."""
        self.disk = open_kv_disk(runner, config, self._num_host_blocks)
        first = self._next_behind(self._num_host_blocks, self.disk)
        self.peers = None
        if config.cache.peers is not None:
            from quintet.executor.peers.boot import (
                open_kv_peers,  # it needs ZeroMQ, and who asks nobody does not
            )

            self.peers = open_kv_peers(runner, config.cache.peers, config, first)
        first = self._next_behind(first, self.peers)
        self.store = open_kv_store(runner, config, first)
        self._next_behind(first, self.store)

    def _next_behind(self, first: int, place: KvElsewhere | None) -> int:
        """Take note of a place's host blocks, numbered from ``first`` on; return the number behind them."""
        if place is None:
            return first
        end = first + place.num_staging_blocks
        self._places.append((first, end, place))
        return end

    def copy_in(self, swaps: bytes) -> None:
        """Copy from host blocks, of swap space or what was fetched into; see `StepPlan.swaps_in`."""
        if not self._places:
            self._host_blocks.copy_in(swaps)
            return
        pairs = np.frombuffer(swaps, np.int32).reshape(-1, 2)
        host = pairs[:, 1]
        from_host = host < self._num_host_blocks
        if from_host.any():
            self._host_blocks.copy_in(pairs[from_host].tobytes())
        for first, end, place in self._places:
            from_place = (first <= host) & (host < end)
            if from_place.any():
                place.copy_in(pairs[from_place, 0], host[from_place])
