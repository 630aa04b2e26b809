"""Blocks on disk: contents that outlive the device, the executor and the server, and the way back to the device.

A place is always in exactly one of three states:

      free ──── order ───▶ being written ──── stored ───▶ holds a content
       ▲                        │ not stored                   │ another is to be stored, or this one was missed
       └────────────────────────┴──────────────────────────────┘

Every full block that becomes findable on the device is stored, unless it is there already; what was used longest ago gives
way, but for what is pinned. What a waiting request wants is fetched into host blocks (`quintet.core.kv.prefetch`).

Never wrong: a key names the content, and the executor reads nothing else under it
(`quintet.executor.kv_transfer.disk.block_file`). What is believed to be there and is not is a miss: the request
computes it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from quintet.core.kv.fetch_cost import FetchCost
from quintet.core.kv.prefetch import Prefetches
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_disk import FileRequest, KvTierRequests, KvTierResults


class DiskPool:
    """Which place holds what, and what is on its way to and fro: a `quintet.core.kv.tiers.Tier`."""

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
        """Host blocks: those that contents are fetched into, consecutive numbers."""
        self.num_places = num_places
        self.free = dict.fromkeys(range(num_places - 1, -1, -1))
        self.place_of: dict[bytes, int] = {}
        """Content -> where it is, used longest ago first."""
        self.storing: dict[bytes, int] = {}
        """Content -> the place that it is being written to."""
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self.pinned: Container[bytes] = ()
        """Contents that do not give way."""
        self.file_orders: list[FileRequest] = []
        """What is to be done with prefixes in files of their own, of what was not ordered yet."""
        self._drops: list[tuple[int, bytes]] = []
        """Places and contents to be forgotten, of what was not ordered yet."""
        self._unwanted: set[bytes] = set()
        """Contents that are being written, and are to be forgotten when they are."""
        self.cost = FetchCost()
        """Of fetching a block."""
        self._due: dict[bytes, int] = {}
        """Content -> the device block to store it from, of what was not ordered yet."""
        self._ordered: list[tuple[int, int, bytes]] = []
        """Place, host block and content to fetch, of what was not ordered yet."""

    # --- keeping ---

    def hold(self, key: bytes, place: int) -> None:
        """Hear what a place holds from before."""
        if place in self.free and key not in self.place_of:
            del self.free[place]
            self.place_of[key] = place

    def stand(self, key: bytes, block: int) -> None:
        """Hear that a full block has just become findable; the plan that writes it comes before the next orders."""
        self._unwanted.discard(key)
        if key not in self.place_of and key not in self.storing:
            self._due[key] = block

    def leave(self, key: bytes, block: int) -> None:
        """See `Tier.leave`: what is not ordered by now is not stored."""
        self._due.pop(key, None)

    def use(self, keys: Sequence[bytes]) -> None:
        """Have these contents, in the order of their tokens, give way last; the tail, worth nothing alone, before the head."""
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
        """Return the place that a content will be written to which is not here; None where none is to be had."""
        place = self._take_place()
        if place is not None:
            self.storing[key] = place
        return place

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Hear that those of these contents that were to be written are not."""
        for key in keys:
            self._unwanted.discard(key)
            place = self.storing.pop(key, None)
            if place is not None:
                self.free[place] = None

    def drop(self, key: bytes) -> None:
        """Forget a content, here and on disk, if it is there or will be."""
        self._due.pop(key, None)
        if key in self.storing:
            self._unwanted.add(key)
        place = self.place_of.pop(key, None)
        if place is not None:
            self.free[place] = None
            self._drops.append((place, key))

    # --- fetching ---

    def ask(self, request_id: int, keys: Sequence[bytes], num_tokens: int, *, whole: bool) -> bool:
        """Fetch these contents, which are on disk, for a request: see `Prefetches.ask`. Return whether any is fetched."""
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
        """Give up what was fetched for too long."""
        self.fetches.expire(now_ns)

    # --- orders and answers ---

    @property
    def due(self) -> Mapping[bytes, int]:
        """Contents that are to be stored and were not ordered yet, and the device blocks that hold them."""
        return self._due

    def add_orders(self, orders: KvTierRequests, now_ns: int) -> None:
        """Add what is to be done: before the next plan is made."""
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
        """Apply what became of orders."""
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
        """See `Tier.take_copies`: nothing is copied this way. What that plan has read, and nobody writes, is free again."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        places = [*self.free, *self.place_of.values(), *self.storing.values()]
        assert sorted(places) == list(range(self.num_places)), len(places)
        assert self.place_of.keys().isdisjoint(self.storing), "stored twice"
        self.fetches.check(waiting)
