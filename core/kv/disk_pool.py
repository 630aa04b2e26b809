"""Disk back end, core half: block contents that outlive the device, the executor and the server.

      free ──── store ───▶ being written ──── stored ───▶ holds a content
       ▲                        │ failed                       │ evicted (LRU), or a read missed
       └────────────────────────┴──────────────────────────────┘

Every full block that becomes reusable on the device is stored unless it is on disk already, and states after full
blocks. The least recently used unpinned block is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

from quintet.core.kv.tier import Source, Tier, Wanted
from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import FileRequest, KvTierRequests, KvTierResults, Store


class DiskPool(Tier):
    """Disk places by content."""

    name = "disk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_places = self.capacity.num_places
        self.free = dict.fromkeys(range(self.num_places - 1, -1, -1))
        self.place_of: OrderedDict[bytes, int] = OrderedDict()
        """Block key -> place, least recently used first."""
        self.storing: dict[bytes, int] = {}
        """Block key -> place being written."""
        self.pinned: Container[bytes] = ()
        """Block keys excluded from eviction."""
        self.file_requests: list[FileRequest] = []
        """Operations on exported prefix files; not sent yet."""
        self._drops: list[tuple[int, bytes]] = []
        """Places and keys to delete; not sent yet."""
        self._unwanted: set[bytes] = set()
        """Keys being written that are deleted once written."""

    # --- storing ---

    def hold(self, key: bytes, place: int) -> None:
        """Register contents found on disk at start."""
        if place in self.free and key not in self.place_of:
            del self.free[place]
            self.place_of[key] = place

    def store(self, keys: list[bytes]) -> None:
        (key,) = keys
        self._unwanted.discard(key)
        if key not in self.place_of and key not in self.storing:
            self.due[key] = keys

    def take_stores(self, block_of: Mapping[bytes, int]) -> list[Store]:
        """See `Tier.take_stores`. Contents without a place are not stored."""
        contents = []
        for key in [*filter(block_of.__contains__, self.due)]:
            place = self.take_place_for(key)
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
        for _ in range(len(self.place_of)):
            key, place = self.place_of.popitem(last=False)
            if key not in self.pinned:
                return place
            self.place_of[key] = place
        return None

    def take_place_for(self, key: bytes) -> int | None:
        """Reserve a place for a content that is not on disk; None when none can be freed."""
        place = self._take_place()
        if place is not None:
            self.storing[key] = place
            self.due.pop(key, None)
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
        self.due.pop(key, None)
        if key in self.storing:
            self._unwanted.add(key)
        place = self.place_of.pop(key, None)
        if place is not None:
            self.free[place] = None
            self._drops.append((place, key))

    # --- fetching ---

    def max_blocks(self, wanted: Wanted) -> int:
        return wanted.num_blocks if self.place_of else 0

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source]:
        keys = filter(self.place_of.__contains__, self.chunks.all_keys(digests))
        return {key: (b"", self.place_of[key], self.num_places) for key in keys}

    def use(self, keys: Sequence[bytes]) -> None:
        """See `Tier.use`: the tail is evicted before the head."""
        for key in reversed(keys):
            place = self.place_of.pop(key, None)
            if place is not None:
                self.place_of[key] = place

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
                self.place_of[key] = place
            if key in self._unwanted:
                self._unwanted.remove(key)
                self.drop(key)
        self.give_up(results.unstored)

    def note_lost(self, names: Sequence[bytes]) -> None:
        for key in names:
            place = self.place_of.pop(key, None)
            if place is not None:
                self.free[place] = None

    def check(self, waiting: set[int]) -> None:
        places = [*self.free, *self.place_of.values(), *self.storing.values()]
        assert sorted(places) == list(range(self.num_places)), len(places)
        assert self.place_of.keys().isdisjoint(self.storing), "on disk and being written"
        super().check(waiting)
