"""KV tiers other than device memory and swap space: disk, peer servers, shared store.

Fetched data goes to staging blocks in host memory, numbered after those of swap space, tier by tier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quintet.executor.distributed.parallel.whole_blocks import HostBlocksOfAllRanks
from quintet.executor.interface import KvDisk, KvTierWorker
from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.features.kv_disk import open_kv_disk
from quintet.executor.kv_transfer.features.kv_offload import HostBlocks
from quintet.executor.kv_transfer.features.kv_store import open_kv_store
from quintet.wire.config import EngineConfig


class KvTiers:
    """The configured KV tiers of a worker."""

    def __init__(
        self,
        open_blocks: Callable[[], WholeBlocks],
        config: EngineConfig,
        runner: str,
        host_blocks: HostBlocks | HostBlocksOfAllRanks,
    ) -> None:
        """open_blocks: called if a tier is configured. runner: name of the model runner. host_blocks: swap space, numbered first.

        Raises `ConfigError` if a tier cannot be opened.
        """
        self._host_blocks = host_blocks
        self._num_host_blocks = host_blocks.num_blocks
        self._tiers: list[tuple[int, int, KvTierWorker]] = []
        """Staging blocks ``[begin, end)`` of each tier."""
        self.disk: KvDisk | None = None
        self.peers: KvTierWorker | None = None
        self.store: KvTierWorker | None = None
        cache, first = config.cache, self._num_host_blocks
        if not cache.leaves:
            return
        blocks = open_blocks()
        if cache.disk is not None:
            self.disk = open_kv_disk(blocks, config, runner, first)
            first = self._register(first, self.disk)
        if cache.peers is not None:
            from quintet.executor.kv_transfer.features.kv_peer import (
                open_kv_peers,  # imports ZeroMQ
            )

            self.peers = open_kv_peers(blocks, cache.peers, config, runner, first)
            first = self._register(first, self.peers)
        if cache.store is not None:
            self.store = open_kv_store(blocks, config, runner, first)
            self._register(first, self.store)

    def _register(self, first: int, tier: KvTierWorker) -> int:
        """Register a tier's staging blocks from ``first``; return the next number."""
        end = first + tier.num_staging_blocks
        self._tiers.append((first, end, tier))
        return end

    def copy_in(self, swaps: bytes) -> None:
        """Copy from host blocks, of swap space or staging; see `StepPlan.swaps_in`."""
        if not self._tiers:
            self._host_blocks.copy_in(swaps)
            return
        pairs = np.frombuffer(swaps, np.int32).reshape(-1, 2)
        host = pairs[:, 1]
        from_host = host < self._num_host_blocks
        if from_host.any():
            self._host_blocks.copy_in(pairs[from_host].tobytes())
        for first, end, tier in self._tiers:
            from_tier = (first <= host) & (host < end)
            if from_tier.any():
                tier.copy_in(pairs[from_tier, 0], host[from_tier])
