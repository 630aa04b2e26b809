"""Blocks of host memory: contents that preempted requests will want again, kept while the device needs the room.

A host block is always in exactly one of three places:

      free ──── save ───▶ holds a content ──── nobody wants it any more ───▶ leaving
       ▲                                                                       │
       └──────────────────────── the plan in the making is sent ───────────────┘

It leaves late because that plan may read it: a plan's copies to the host come before its copies from the host.

A content has a key. Where it is that of the prefix cache (`quintet.core.kv.prefix`), requests that begin alike want the
same one. A wanted content is either here already, or on the device in a block that it is saved from when that is given away
(`BlockPool.take`). For each there is a block: what is wanted first is certain to be kept, the beginning of a sequence
before its end, without which the end is worth nothing.

The executor's host memory is as old as its tables: a new one begins with a new pool. Knows nothing of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class HostPool:
    """Which host block holds what, and who wants it: a `quintet.core.kv.tiers.Tier`. Without blocks it holds nothing."""

    __slots__ = ("block_of", "copies", "first", "free", "keys_of", "leaving", "num_blocks", "wanted")

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        """first: the number of the first one."""
        self.num_blocks = num_blocks
        self.first = first
        self.free = list(range(first + num_blocks - 1, first - 1, -1))
        self.leaving: list[int] = []
        self.block_of: dict[bytes, int] = {}
        """Content -> the block that holds it, or will when the next plan is executed."""
        self.wanted: dict[bytes, int] = {}
        """Content -> how many preempted requests want it."""
        self.keys_of: dict[int, list[bytes]] = {}
        """Preempted request -> what it wants, from its beginning on."""
        self.copies: dict[int, int] = {}
        """Host block -> device block whose content it gets from the next plan."""

    def want(self, request_id: int, keys: Sequence[bytes], *, whole: bool = False) -> list[bytes]:
        """Let a request that is being preempted want these contents, as many of the first as there is room for.

        ``whole``: all of them or none.
        """
        wanted = self.wanted
        room = self.num_blocks - len(wanted) - len(self.leaving)
        if whole and sum(key not in wanted for key in keys) > room:
            return []
        mine: list[bytes] = []
        for key in keys:
            if key not in wanted:
                if not room:
                    break
                room -= 1
                wanted[key] = 0
            wanted[key] += 1
            mine.append(key)
        if mine:
            self.keys_of[request_id] = mine
        return mine

    def forget(self, request_id: int) -> None:
        """Let a request want nothing any more: the plan in the making gives it what it wanted, or it has ended.

        A copy that is due is made, even so: that plan may read it.
        """
        for key in self.keys_of.pop(request_id, ()):
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                block = self.block_of.pop(key, None)
                if block is not None:
                    self.leaving.append(block)

    def leave(self, key: bytes, device_block: int) -> None:
        """Have the next plan copy this content, if it is wanted and not here, from the device before anything else."""
        if key in self.wanted and key not in self.block_of:
            self.copies[self.place(key)] = device_block

    def place(self, key: bytes) -> int:
        """Return a block for a content that is wanted and not here."""
        block = self.block_of[key] = self.free.pop()
        return block

    def lose(self, keys: Sequence[bytes]) -> None:
        """Hear that the blocks of these contents, which are wanted, do not hold them: nobody wants them any more."""
        if not keys:
            return
        lost = set(keys)
        for key in keys:
            del self.wanted[key]
            self.leaving.append(self.block_of.pop(key))
        for request_id, mine in self.keys_of.items():
            self.keys_of[request_id] = [key for key in mine if key not in lost]

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest run of these contents, from the first on: they are here, or will be when the
        next plan has made its first copies."""
        found: list[int] = []
        block_of = self.block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take_copies(self) -> list[int]:
        """Return pairs ``device block, host block`` for the plan that is being sent: all since the one before it."""
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
        assert self.block_of.keys() <= self.wanted.keys(), "held, and not wanted"
        assert len(self.wanted) + len(self.leaving) <= self.num_blocks, "wanted, and no room"
        assert self.copies.keys() <= {*self.block_of.values(), *self.leaving}, self.copies
        assert waiting.issuperset(self.keys_of), (waiting, list(self.keys_of))
