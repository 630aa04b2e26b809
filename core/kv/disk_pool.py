"""Disk tier: block contents that outlive the device, the executor and the server.

      free ──── store ───▶ being written ──── stored ───▶ holds a content
       ▲                        │ failed                       │ evicted (LRU), or a read missed
       └────────────────────────┴──────────────────────────────┘

Every full block that becomes reusable on the device is stored unless it is on disk already. The least recently used
unpinned block is evicted. Blocks that a waiting request wants are fetched into host blocks
(`quintet.core.kv.prefetch`).

A key names the exact content, and the executor verifies it (`quintet.executor.kv_transfer.disk.block_file`). A
missing block is a miss: the request computes it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from quintet.core.kv.prefetch import FetchCost, Prefetches
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import FileRequest, KvTierRequests, KvTierResults


class DiskPool:
    """Disk places by content, and transfers in progress: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = (
        "_drops",
        "_due",
        "_ordered",
        "_unwanted",
        "cost",
        "fetches",
        "file_orders",
        "free",
        "num_places",
        "pinned",
        "place_of",
        "storing",
    )

    def __init__(self, num_places: int, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks are numbered consecutively from ``first_host_block``; fetches are written into them."""
        self.num_places = num_places
        self.free = dict.fromkeys(range(num_places - 1, -1, -1))
        self.place_of: dict[bytes, int] = {}
        """Block key -> place, least recently used first."""
        self.storing: dict[bytes, int] = {}
        """Block key -> place being written."""
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self.pinned: Container[bytes] = ()
        """Block keys excluded from eviction."""
        self.file_orders: list[FileRequest] = []
        """Operations on exported prefix files; not sent yet."""
        self._drops: list[tuple[int, bytes]] = []
        """Places and keys to delete; not sent yet."""
        self._unwanted: set[bytes] = set()
        """Keys being written that are deleted once written."""
        self.cost = FetchCost()
        """Cost of fetching a block."""
        self._due: dict[bytes, int] = {}
        """Block key -> device block to store; not sent yet."""
        self._ordered: list[tuple[int, int, bytes]] = []
        """Place, host block and key to fetch; not sent yet."""

    # --- storing ---

    def hold(self, key: bytes, place: int) -> None:
        """Register contents found on disk at start."""
        if place in self.free and key not in self.place_of:
            del self.free[place]
            self.place_of[key] = place

    def queue_store(self, key: bytes, block: int) -> None:
        """Queue a full block that became reusable; the plan that writes it precedes the next transfer requests."""
        self._unwanted.discard(key)
        if key not in self.place_of and key not in self.storing:
            self._due[key] = block

    def on_evict(self, key: bytes, block: int) -> None:
        """See `Tier.on_evict`: a store that was not sent yet is dropped."""
        self._due.pop(key, None)

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark these contents as recently used, in token order; the tail is evicted before the head."""
        for key in reversed(keys):
            place = self.place_of.pop(key, None)
            if place is not None:
                self.place_of[key] = place

    def _take_place(self) -> int | None:
        if self.free:
            return self.free.popitem()[0]
        for _ in range(len(self.place_of)):
            key = next(iter(self.place_of))
            place = self.place_of.pop(key)
            if key not in self.pinned:
                return place
            self.place_of[key] = place
        return None

    def take_place_for(self, key: bytes) -> int | None:
        """Reserve a place for a content that is not on disk; None when none can be freed."""
        place = self._take_place()
        if place is not None:
            self.storing[key] = place
        return place

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Free the places of contents that were not written."""
        for key in keys:
            self._unwanted.discard(key)
            place = self.storing.pop(key, None)
            if place is not None:
                self.free[place] = None

    def drop(self, key: bytes) -> None:
        """Delete a content, on disk or being written."""
        self._due.pop(key, None)
        if key in self.storing:
            self._unwanted.add(key)
        place = self.place_of.pop(key, None)
        if place is not None:
            self.free[place] = None
            self._drops.append((place, key))

    # --- fetching ---

    def ask(self, request_id: int, keys: Sequence[bytes], num_tokens: int, *, whole: bool) -> bool:
        """Fetch these contents for a request: see `Prefetches.ask`. Return True when any is fetched."""
        new = self.fetches.ask(request_id, keys, num_tokens, whole=whole)
        if new is None:
            return False
        self._ordered += ((self.place_of[key], block, key) for block, key in new)
        return True

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """See `Tier.fetch`."""
        return self.fetches.fetch(request_id, keys)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        self.fetches.forget(request_id)

    def expire(self, now_ns: int) -> None:
        """Give up fetches past their deadline."""
        self.fetches.expire(now_ns)

    # --- requests and results ---

    @property
    def due(self) -> Mapping[bytes, int]:
        """Contents to store that were not sent yet, by device block."""
        return self._due

    def add_orders(self, orders: KvTierRequests, now_ns: int) -> None:
        """Add the transfers to send before the next plan."""
        self.fetches.begin_orders(now_ns)
        stores = list[int]()
        orders.drops = pack_i32([place for place, _ in self._drops])
        orders.drop_keys += (key for _, key in self._drops)
        self._drops.clear()
        orders.files += self.file_orders
        self.file_orders.clear()
        for key, block in self._due.items():
            place = self.take_place_for(key)
            if place is None:
                break
            stores += (block, place)
            orders.store_keys.append(key)
        orders.stores = pack_i32(stores)
        orders.fetches = pack_i32([number for place, block, _ in self._ordered for number in (place, block)])
        orders.fetch_keys += (key for _, _, key in self._ordered)
        self._due.clear()
        self._ordered.clear()

    def answer(self, answers: KvTierResults) -> None:
        """Apply the results of transfers."""
        for key in answers.stored:
            place = self.storing.pop(key, None)
            if place is not None:
                self.place_of[key] = place
            if key in self._unwanted:
                self._unwanted.remove(key)
                self.drop(key)
        self.give_up(answers.unstored)
        fetched = unpack_i32(answers.fetched)
        self.fetches.settle(fetched, missed=False)
        for key in self.fetches.settle(unpack_i32(answers.missed), missed=True):
            place = self.place_of.pop(key, None)
            if place is not None:
                self.free[place] = None
        if fetched:
            self.cost.note(len(fetched), answers.fetch_ns)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: this tier has none. Frees host blocks that the previous plan has read."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        places = [*self.free, *self.place_of.values(), *self.storing.values()]
        assert sorted(places) == list(range(self.num_places)), len(places)
        assert self.place_of.keys().isdisjoint(self.storing), "on disk and being written"
        self.fetches.check(waiting)
