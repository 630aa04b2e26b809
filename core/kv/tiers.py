"""Tiers: where contents outlive the device's blocks, and the little that the rest of the core knows of them.

Every tier hands contents back by way of host memory, from where a plan copies them into blocks of the device:

      device block ── leaving, findable ──▶ tier ── fetch ──▶ pending ──▶ fetched: host block ── a plan ──▶ device block

A fetch that takes no time is fetched at once (host memory); of another (disk, another server, a store) the answer is that it is
pending, until it is not. A request that waits for one waits in the queue, and others pass it.

Contents are named by keys as the prefix cache has them (`quintet.core.kv.prefix`): the chained hash of all tokens up to there,
and the group of layers. What model and layout they are of is the same for all contents of a tier: the executor sees to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.host_pool import HostPool
from quintet.core.kv.peer_pool import PeerPool
from quintet.core.kv.store_pool import StorePool


class Tier(Protocol):
    """One place where contents are kept."""

    def leave(self, key: bytes, block: int) -> None:
        """Hear that the device is about to give ``block``, which holds the content, another one: the next plan's first copies
        still find it."""

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """Return the host blocks that hold the longest run of what a request wants, from the first on; None while pending."""

    def forget(self, request_id: int) -> None:
        """Hear that a request wants nothing any more: the plan in the making gives it what it wanted, or it has ended."""

    def take_copies(self) -> list[int]:
        """Return pairs ``device block, host block`` to copy first in the plan that is being sent."""

    def check(self, waiting: set[int]) -> None:
        """Assert every invariant; ``waiting``: the requests that may want something."""


class Tiers:
    """All tiers there are; of some the features ask by name, everybody else tells and asks all."""

    __slots__ = ("_all", "disk", "host", "on_leave", "peers", "store")

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
        self.on_leave: Callable[[bytes], None] | None = None
        """Who else hears of contents that the device gives away."""
        tiers: tuple[Tier | None, ...] = (self.host if num_host_blocks else None, disk, peers, store)
        self._all: tuple[Tier, ...] = tuple(tier for tier in tiers if tier is not None)

    def leave(self, key: bytes, block: int) -> None:
        """See `Tier.leave`."""
        if self.on_leave is not None:
            self.on_leave(key)
        for tier in self._all:
            tier.leave(key, block)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        for tier in self._all:
            tier.forget(request_id)

    @property
    def is_fetching(self) -> bool:
        """Whether somebody waits for what is on its way; how long, `expire` bounds."""
        if self.store is not None and self.store.is_awaited:
            return True
        return any(tier.fetches.is_awaited for tier in (self.disk, self.peers) if tier is not None)

    def expire(self, now_ns: int) -> None:
        """Give up what was fetched for too long."""
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
