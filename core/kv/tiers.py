"""All KV back ends of an engine, in order of cost: host memory, other servers, disk, shared store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.store_pool import StorePool
from quintet.core.kv.swap_pool import SwapPool
from quintet.core.kv.tier import Tier
from quintet.wire.kv_tiers import TierName

BACK_ENDS: dict[TierName, type[Tier]] = {
    kind.name: kind for kind in (SwapPool, PeerPool, DiskPool, StorePool)
}
"""Core half of each back end, cheapest first. `quintet.executor.kv_transfer.connector` has the device halves."""

EVENTS: dict[tuple[TierName, str, str], dict[str, str]] = {
    ("disk", "blocks", "KV blocks on disk"): {
        "stored": "written",
        "unstored": "not written because the disk is slow or full",
        "fetched": "read",
        "missed": "requested, but absent or damaged",
    },
    ("peer", "blocks", "KV blocks between servers"): {
        "offered": "copied for other servers to fetch",
        "fetched": "received from another server",
        "missed": "requested from another server, but not received or damaged",
    },
    ("store", "blocks", "KV blocks of the shared store"): {
        "fetched": "received",
        "missed": "requested, and not received or incomplete",
    },
    ("store", "chunks", "Chunks of KV blocks for the shared store"): {
        "stored": "or already present",
        "unstored": "the store is full, slow or unreachable",
    },
}
"""Counters of each back end: noun in the name, and what is counted -> events and their meaning."""


class Tiers:
    """The configured back ends. Those with messages are *remote*."""

    __slots__ = ("all", "evict_listener", "remote")

    def __init__(self, tiers: Iterable[Tier] = ()) -> None:
        by_cost = [*BACK_ENDS]
        self.all = sorted(tiers, key=lambda tier: by_cost.index(tier.name))
        self.remote = [tier for tier in self.all if not tier.is_local]
        self.evict_listener: Callable[[bytes], None] | None = None
        """Callback for keys that the device evicts."""

    def on_evict(self, key: bytes, block: int) -> None:
        """See `Tier.on_evict`."""
        if self.evict_listener is not None:
            self.evict_listener(key)
        for tier in self.all:
            tier.on_evict(key, block)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`."""
        return [block for tier in self.all for block in tier.take_copies()]

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        for tier in self.all:
            tier.forget(request_id)
