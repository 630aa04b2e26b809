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

from collections.abc import Iterable, Sequence


class HostPool:
    """Which host block holds what, and who wants it. Without blocks it wants and holds nothing."""

    __slots__ = ("block_of", "copies", "free", "keys_of", "leaving", "num_blocks", "wanted")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
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

    def save(self, key: bytes, device_block: int) -> None:
        """Have the next plan copy this content, if it is wanted and not here, from the device before anything else."""
        if key in self.wanted and key not in self.block_of:
            block = self.free.pop()
            self.block_of[key] = block
            self.copies[block] = device_block

    def longest(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest run of these contents, from the first on."""
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
