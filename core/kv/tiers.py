"""All KV back ends of an engine, in order of cost: host memory, other servers, disk, shared store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.host_pool import HostPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.store_pool import StorePool
from quintet.core.kv.tier import Tier
from quintet.wire.kv_tiers import TierName

BACK_ENDS: dict[TierName, type[Tier]] = {"peer": PeerPool, "disk": DiskPool, "store": StorePool}
"""Core half of each back end, cheapest first. `quintet.executor.kv_transfer.connector` has the device halves."""


class Tiers:
    """The configured back ends. Host memory is copied by plans alone; the others are *remote*."""

    __slots__ = ("evict_listener", "host", "is_configured", "remote")

    def __init__(self, num_host_blocks: int = 0, remote: Iterable[Tier] = ()) -> None:
        self.host = HostPool(num_host_blocks)
        by_cost = [*BACK_ENDS]
        self.remote: Sequence[Tier] = sorted(remote, key=lambda tier: by_cost.index(tier.name))
        self.is_configured = bool(num_host_blocks or self.remote)
        """False without back ends: nothing can be fetched, stored or copied."""
        self.evict_listener: Callable[[bytes], None] | None = None
        """Callback for keys that the device evicts."""

    def on_evict(self, key: bytes, block: int) -> None:
        """Called before the device overwrites ``block``. The copies at the start of the next plan still read the old
        content.
        """
        if self.evict_listener is not None:
            self.evict_listener(key)
        self.host.on_evict(key, block)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        self.host.forget(request_id)
        for tier in self.remote:
            tier.forget(request_id)
