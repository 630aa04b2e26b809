"""StoreChunks: what a shared store keeps as one object, and how they are called.

Of a group that holds tokens a run is so many blocks that follow each other; of a group of states it is one state, of those that
are kept regularly. A run is called by the key of its last block::

    blocks of a group   | 0 … 15 | 16 … 31 | 32 … 47 | 48 …      runs of 16 blocks of 16 tokens
    called                     15        31        47            key of
    states                                           64          one behind every 64 blocks

One object for each block would be small: an object store takes as long to begin one as to bring a megabyte. One for each prompt
would be shared by nobody. How long runs are follows from the size of blocks alone, so all servers agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefix import key_of

RUN_TOKENS = 256
"""Of a run, at most, but of a block at least: 3 MB of a model of half a billion parameters, 32 MB of one of eight."""


@dataclass(slots=True, frozen=True)
class StoreChunks:
    """Which runs there are."""

    groups: Groups
    num_blocks: int
    """Of a run of tokens."""
    every: int
    """Behind every so many blocks a state is kept: a multiple of ``num_blocks``."""

    @classmethod
    def of(cls, groups: Groups, block_size: int, keep_every: int) -> StoreChunks:
        """Return the runs of blocks of this size. keep_every: behind so many tokens, rounded up to blocks, states are kept."""
        every = -(-keep_every // block_size)
        most = max(1, RUN_TOKENS // block_size)
        return cls(groups, max(size for size in range(1, min(most, every) + 1) if every % size == 0), every)

    def length(self, group: int) -> int:
        """Return from how many blocks to how many there is another name."""
        return self.every if self.groups.all[group].is_state else self.num_blocks

    def chains(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return, by group, the names of all runs of these blocks, in the order of their tokens."""
        return [
            [key_of(digest, group) for digest in digests[self.length(group) - 1 :: self.length(group)]]
            for group in range(len(self.groups.all))
        ]

    def keys(self, digests: Sequence[bytes], group: int, index: int) -> list[bytes]:
        """Return the keys of the blocks of a group's run; the last one is its name."""
        end = (index + 1) * self.length(group)
        begin = end - 1 if self.groups.all[group].is_state else end - self.num_blocks
        return [key_of(digest, group) for digest in digests[begin:end]]
