"""Disk back end, core half: block contents that outlive the device, the executor and the server.

      absent ──── store ───▶ being written ──── stored ───▶ held
        ▲                         │ failed                   │ evicted (LRU), or a read missed
        └─────────────────────────┴──────────────────────────┘

Every full block that becomes reusable on the device is stored unless it is on disk already, and states after full
blocks. The least recently used unpinned block is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile

from quintet.core.kv.tier import Source, Tier, Wanted
from quintet.wire.codec import pack_i32
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, Store


class DiskPool(Tier):
    """Contents on disk."""

    name = "disk"
    held: OrderedDict[bytes, None]
    """Least recently used first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held = OrderedDict()
        self._drops: list[bytes] = []
        """Keys to delete; not sent yet."""
        self._unwanted: set[bytes] = set()
        """Keys being written that are deleted once written."""

    # --- storing ---

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if len(self.held) < self.capacity.num_places:
                self.held[key] = None

    def store(self, keys: list[bytes]) -> None:
        (key,) = keys
        self._unwanted.discard(key)
        if key not in self.held and key not in self.storing:
            self.due[key] = keys

    def take_stores(self, block_of: Mapping[bytes, int]) -> list[Store]:
        """See `Tier.take_stores`. Contents without space are not stored."""
        keys = [*takewhile(self.reserve, [*filter(block_of.__contains__, self.due)])]
        self.due.clear()
        return [Store(pack_i32(block_of[key] for key in keys), keys)] if keys else []

    def reserve(self, key: bytes) -> bool:
        if len(self.held) + len(self.storing) >= self.capacity.num_places:
            for _ in range(len(self.held)):
                evicted = next(iter(self.held))
                if evicted not in self.pinned:
                    self.drop(evicted)
                    break
                self.held.move_to_end(evicted)
            else:
                return False
        self.storing[key] = 1
        self.due.pop(key, None)
        return True

    def give_up(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._unwanted.discard(key)
            self.storing.pop(key, None)

    def drop(self, key: bytes) -> None:
        self.due.pop(key, None)
        if key in self.storing:
            self._unwanted.add(key)
        if key in self.held:
            del self.held[key]
            self._drops.append(key)

    # --- fetching ---

    def max_blocks(self, wanted: Wanted) -> int:
        return wanted.num_blocks if self.held else 0

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source]:
        return dict.fromkeys(filter(self.held.__contains__, self.chunks.all_keys(digests)), (b"", 0, 1))

    def use(self, keys: Sequence[bytes]) -> None:
        """See `Tier.use`: the tail is evicted before the head."""
        for key in reversed(keys):
            if key in self.held:
                self.held.move_to_end(key)

    # --- messages ---

    def complete(self, requests: KvTierRequests, now_ns: int) -> None:
        requests.drops, self._drops = self._drops, []
        requests.files, self.file_requests = self.file_requests, []

    def note_stored(self, results: KvTierResults) -> None:
        for key in results.stored:
            if self.storing.pop(key, None):
                self.held[key] = None
            if key in self._unwanted:
                self._unwanted.remove(key)
                self.drop(key)
        self.give_up(results.unstored)

    def note_lost(self, names: Sequence[bytes]) -> None:
        for key in names:
            self.held.pop(key, None)

    def check(self, waiting: set[int]) -> None:
        assert len(self.held) + len(self.storing) <= self.capacity.num_places, len(self.held)
        assert self.held.keys().isdisjoint(self.storing), "on disk and being written"
        super().check(waiting)
