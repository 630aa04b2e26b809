"""KV tiers: storage that outlives the device's blocks, and its interface to the scheduler.

Every tier returns contents through host memory, from which a plan copies them into device blocks:

      device block ── evicted or stored ──▶ tier ── fetch ──▶ pending ──▶ fetched: host block ── a plan ──▶ device block

A fetch from host memory completes at once. A fetch from disk, a peer or a store is pending until it completes. A
request with a pending fetch stays queued, and others pass it.

Contents are named by prefix cache keys (`quintet.core.kv.prefix`): the chained hash of all tokens so far, and the
group of layers. The executor ensures that all contents of a tier belong to one model and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.host_pool import HostPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.store_pool import StorePool


class Tier(Protocol):
    """One storage tier."""

    def on_evict(self, key: bytes, block: int) -> None:
        """Called before the device overwrites ``block``. The copies at the start of the next plan still read the old
        content.
        """

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """Return the host blocks of the longest available prefix of the wanted keys; None while pending."""

    def forget(self, request_id: int) -> None:
        """Drop a request's wanted keys: the plan under construction uses them, or the request has ended."""

    def take_copies(self) -> list[int]:
        """Return pairs ``device block, host block`` to copy at the start of the plan being sent."""

    def check(self, waiting: set[int]) -> None:
        """Assert every invariant; ``waiting``: the requests that may want contents."""


class Tiers:
    """All configured tiers. Features access one by name; other callers use all."""

    __slots__ = ("_all", "disk", "evict_listener", "host", "peers", "store")

    def __init__(
        self,
        num_host_blocks: int = 0,
        disk: DiskPool | None = None,
        peers: PeerPool | None = None,
        store: StorePool | None = None,
    ) -> None:
        self.host = HostPool(num_host_blocks)
        self.disk = disk
        self.peers = peers
        self.store = store
        self.evict_listener: Callable[[bytes], None] | None = None
        """Callback for keys that the device evicts."""
        tiers: tuple[Tier | None, ...] = (self.host if num_host_blocks else None, disk, peers, store)
        self._all: tuple[Tier, ...] = tuple(tier for tier in tiers if tier is not None)

    def on_evict(self, key: bytes, block: int) -> None:
        """See `Tier.on_evict`."""
        if self.evict_listener is not None:
            self.evict_listener(key)
        for tier in self._all:
            tier.on_evict(key, block)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        for tier in self._all:
            tier.forget(request_id)

    @property
    def is_fetching(self) -> bool:
        """True while a request waits for a fetch; `expire` limits the time."""
        if self.store is not None and self.store.is_awaited:
            return True
        return any(tier.fetches.is_awaited for tier in (self.disk, self.peers) if tier is not None)

    def expire(self, now_ns: int) -> None:
        """Give up fetches past their deadline."""
        for tier in (self.disk, self.peers, self.store):
            if tier is not None:
                tier.expire(now_ns)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`."""
        return [block for tier in self._all for block in tier.take_copies()]

    def check(self, waiting: Iterable[int]) -> None:
        """See `Tier.check`."""
        requests = set(waiting)
        for tier in self._all:
            tier.check(requests)
