"""Device halves of the configured KV back ends, and their staging blocks in host memory.

Host blocks are numbered consecutively: first those of swap space, then the staging blocks of each back end.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

from quintet.executor.distributed.parallel.whole_blocks import HostBlocksOfAllRanks
from quintet.executor.kv_transfer.back_end import BackEnd
from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.wire.config import EngineConfig
from quintet.wire.kv_tiers import TierName

OpenBackEnd = Callable[[WholeBlocks, EngineConfig, str, int], BackEnd | None]
"""Open a back end for these blocks, a model runner's name and the number of its first staging block.

None if it is not configured. Raises `ConfigError` if it cannot be opened.
"""

BACK_ENDS: dict[TierName, str] = {
    "disk": "quintet.executor.kv_transfer.disk.back_end:open_disk",
    "peer": "quintet.executor.kv_transfer.peers.back_end:open_peers",
    "store": "quintet.executor.kv_transfer.store.back_end:open_store",
}
"""Import string of each back end's `OpenBackEnd`. `quintet.core.kv.tiers` has the core halves."""


class KvTiers:
    """The configured back ends of a worker."""

    def __init__(
        self,
        open_blocks: Callable[[], WholeBlocks],
        config: EngineConfig,
        runner: str,
        host_blocks: HostBlocks | HostBlocksOfAllRanks,
    ) -> None:
        """open_blocks: called if a back end is configured. runner: name of the model runner. host_blocks: swap space.

        Raises `ConfigError` if a back end cannot be opened.
        """
        self._host_blocks = host_blocks
        self.back_ends: list[BackEnd] = []
        if not config.cache.leaves:
            return
        blocks, first = open_blocks(), host_blocks.num_blocks
        for path in BACK_ENDS.values():
            module, _, name = path.partition(":")
            open_back_end: OpenBackEnd = getattr(import_module(module), name)
            opened = open_back_end(blocks, config, runner, first)
            if opened is not None:
                self.back_ends.append(opened)
                first += opened.capacity.num_staging_blocks

    def copy_in(self, swaps: bytes) -> None:
        """Copy from host blocks, of swap space or staging; see `StepPlan.swaps_in`."""
        if not self.back_ends:
            self._host_blocks.copy_in(swaps)
            return
        pairs = np.frombuffer(swaps, np.int32).reshape(-1, 2)
        host = pairs[:, 1]
        from_host = host < self._host_blocks.num_blocks
        if from_host.any():
            self._host_blocks.copy_in(pairs[from_host].tobytes())
        for each in self.back_ends:
            is_own = (each.first <= host) & (host < each.first + len(each.staging))
            if is_own.any():
                each.copy_in(pairs[is_own, 0], host[is_own])
