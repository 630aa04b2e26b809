"""Pool of host blocks by content: of preempted requests, or fetched for waiting ones.

      free ──── save ───▶ holds a content ──── no longer wanted ─────────▶ leaving
       ▲                                                                       │
       └──────────────────── the plan under construction is sent ──────────────┘

A block leaves only after that plan is sent, because the plan may read it: copies to the host precede copies from the
host.

Contents are named by prefix cache keys (`quintet.core.kv.prefix`), so requests with one prefix share them. A wanted
content is on the host, or still on the device and saved when the device evicts it (`BlockPool.take`). Every wanted
content has a reserved host block. The head of a sequence is reserved before its tail, which is useless alone.

A new executor starts with a new pool. Reads no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class HostPool:
    """Host blocks by content, and the requests that want them. Without blocks it is empty."""

    __slots__ = ("block_of", "copies", "first", "free", "keys_of", "leaving", "num_blocks", "wanted")

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        """first: number of the first host block."""
        self.num_blocks = num_blocks
        self.first = first
        self.free = list(range(first + num_blocks - 1, first - 1, -1))
        self.leaving: list[int] = []
        self.block_of: dict[bytes, int] = {}
        """Block key -> host block that holds it, or will after the next plan."""
        self.wanted: dict[bytes, int] = {}
        """Block key -> number of preempted requests that want it."""
        self.keys_of: dict[int, list[bytes]] = {}
        """Preempted request -> wanted keys, in token order."""
        self.copies: dict[int, int] = {}
        """Host block -> device block to copy into it in the next plan."""

    @property
    def num_free(self) -> int:
        """Number of host blocks that no content has reserved."""
        return self.num_blocks - len(self.wanted) - len(self.leaving)

    def want(self, request_id: int, keys: Sequence[bytes], *, whole: bool = False) -> list[bytes]:
        """Register the keys that a preempted request wants: as many of the first as free host blocks allow.

        ``whole``: all or none. Returns the registered keys.
        """
        wanted = self.wanted
        num_free = self.num_free
        if whole and sum(key not in wanted for key in keys) > num_free:
            return []
        registered: list[bytes] = []
        for key in keys:
            if key not in wanted:
                if not num_free:
                    break
                num_free -= 1
                wanted[key] = 0
            wanted[key] += 1
            registered.append(key)
        if registered:
            self.keys_of[request_id] = registered
        return registered

    def forget(self, request_id: int) -> None:
        """Drop a request's wanted keys: the plan under construction uses them, or the request has ended.

        A pending copy is still made, because that plan may read it.
        """
        for key in self.keys_of.pop(request_id, ()):
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                block = self.block_of.pop(key, None)
                if block is not None:
                    self.leaving.append(block)

    def on_evict(self, key: bytes, device_block: int) -> None:
        """Copy this content in the next plan if it is wanted and not on the host yet."""
        if key in self.wanted and key not in self.block_of:
            self.copies[self.place(key)] = device_block

    def place(self, key: bytes) -> int:
        """Return a host block for a content that is wanted and not on the host."""
        block = self.block_of[key] = self.free.pop()
        return block

    def lose(self, keys: Sequence[bytes]) -> None:
        """Drop wanted contents that were not delivered."""
        if not keys:
            return
        lost = set(keys)
        for key in keys:
            del self.wanted[key]
            self.leaving.append(self.block_of.pop(key))
        for request_id, registered in self.keys_of.items():
            self.keys_of[request_id] = [key for key in registered if key not in lost]

    def take_copies(self) -> list[int]:
        """Return pairs ``device block, host block`` for the plan being sent: all since the previous one."""
        pairs = [block for host, device in self.copies.items() for block in (device, host)]
        self.copies.clear()
        self.free += self.leaving
        self.leaving.clear()
        return pairs

    def check(self, waiting: set[int]) -> None:
        """Assert every invariant."""
        places = self.free + self.leaving + list(self.block_of.values())
        assert sorted(places) == list(range(self.first, self.first + self.num_blocks)), Counter(
            places
        ).most_common(3)
        wants: Counter[bytes] = Counter()
        for keys in self.keys_of.values():
            wants.update(keys)
        assert wants == self.wanted, (wants, self.wanted)
        assert self.block_of.keys() <= self.wanted.keys(), "held but not wanted"
        assert len(self.wanted) + len(self.leaving) <= self.num_blocks, "more wanted than host blocks"
        assert self.copies.keys() <= {*self.block_of.values(), *self.leaving}, self.copies
        assert waiting.issuperset(self.keys_of), (waiting, list(self.keys_of))
