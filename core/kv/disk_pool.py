"""Disk back end, core half: block contents that outlive the device, the executor and the server.

      free ──── store ───▶ being written ──── stored ───▶ holds a content
       ▲                        │ failed                       │ evicted (LRU), or a read missed
       └────────────────────────┴──────────────────────────────┘

Every full block that becomes reusable on the device is stored unless it is on disk already, and states after full
blocks. The least recently used unpinned block is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from quintet.core.kv.tier import Source, Tier, Wanted
from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, Store


class DiskPool(Tier):
    """Disk places by content."""

    name = "disk"
    held: OrderedDict[bytes, int]
    """Least recently used first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_places = self.capacity.num_places
        self.free = dict.fromkeys(range(self.num_places - 1, -1, -1))
        self.held = OrderedDict()
        self._drops: list[tuple[int, bytes]] = []
        """Places and keys to delete; not sent yet."""
        self._unwanted: set[bytes] = set()
        """Keys being written that are deleted once written."""

    # --- storing ---

    def hold(self, key: bytes, place: int) -> None:
        if place in self.free and key not in self.held:
            del self.free[place]
            self.held[key] = place

    def store(self, keys: list[bytes]) -> None:
        (key,) = keys
        self._unwanted.discard(key)
        if key not in self.held and key not in self.storing:
            self.due[key] = keys

    def take_stores(self, block_of: Mapping[bytes, int]) -> list[Store]:
        """See `Tier.take_stores`. Contents without a place are not stored."""
        contents = []
        for key in [*filter(block_of.__contains__, self.due)]:
            place = self.reserve(key)
            if place is None:
                break
            contents.append((block_of[key], key, place))
        self.due.clear()
        if not contents:
            return []
        blocks, keys, places = zip(*contents, strict=True)
        return [Store(pack_i32(blocks), [*keys], pack_i32(places))]

    def _take_place(self) -> int | None:
        if self.free:
            return self.free.popitem()[0]
        for _ in range(len(self.held)):
            key, place = self.held.popitem(last=False)
            if key not in self.pinned:
                return place
            self.held[key] = place
        return None

    def reserve(self, key: bytes) -> int | None:
        place = self._take_place()
        if place is not None:
            self.storing[key] = place
            self.due.pop(key, None)
        return place

    def give_up(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._unwanted.discard(key)
            place = self.storing.pop(key, None)
            if place is not None:
                self.free[place] = None

    def drop(self, key: bytes) -> None:
        self.due.pop(key, None)
        if key in self.storing:
            self._unwanted.add(key)
        place = self.held.pop(key, None)
        if place is not None:
            self.free[place] = None
            self._drops.append((place, key))

    # --- fetching ---

    def max_blocks(self, wanted: Wanted) -> int:
        return wanted.num_blocks if self.held else 0

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source]:
        keys = filter(self.held.__contains__, self.chunks.all_keys(digests))
        return {key: (b"", self.held[key], self.num_places) for key in keys}

    def use(self, keys: Sequence[bytes]) -> None:
        """See `Tier.use`: the tail is evicted before the head."""
        for key in reversed(keys):
            place = self.held.pop(key, None)
            if place is not None:
                self.held[key] = place

    # --- messages ---

    def complete(self, requests: KvTierRequests, now_ns: int) -> None:
        requests.drops = pack_i32([place for place, _ in self._drops])
        requests.drop_keys = [key for _, key in self._drops]
        self._drops.clear()
        requests.files, self.file_requests = self.file_requests, []

    def note_stored(self, results: KvTierResults) -> None:
        for key in results.stored:
            place = self.storing.pop(key, None)
            if place is not None:
                self.held[key] = place
            if key in self._unwanted:
                self._unwanted.remove(key)
                self.drop(key)
        self.give_up(results.unstored)

    def note_lost(self, names: Sequence[bytes]) -> None:
        for key in names:
            place = self.held.pop(key, None)
            if place is not None:
                self.free[place] = None

    def check(self, waiting: set[int]) -> None:
        places = [*self.free, *self.held.values(), *self.storing.values()]
        assert sorted(places) == list(range(self.num_places)), len(places)
        assert self.held.keys().isdisjoint(self.storing), "on disk and being written"
        super().check(waiting)
