"""Chunks: the objects of a shared KV store, and their names.

A chunk of a token group holds consecutive blocks. A chunk of a state group holds one state, of those after every so
many blocks:

    blocks of a group   | 0 … 15 | 16 … 31 | 32 … 47 | 48 …      chunks of 16 blocks of 16 tokens
    name: key of block         15        31        47
    states                                           64          one after every 64 blocks

One object per block would be small: an object store takes as long to start a request as to transfer a megabyte. One
per prompt could not be shared. The chunk size follows from the block size alone, so all servers agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefix import key_of

RUN_TOKENS = 256
"""Maximum tokens of a chunk, at least one block: 3 MB for a model of 0.5 billion parameters, 32 MB for 8 billion."""


@dataclass(slots=True, frozen=True)
class StoreChunks:
    """Chunk layout of one model."""

    groups: Groups
    num_blocks: int
    """Blocks per chunk of a token group."""
    every: int
    """Blocks between stored states: a multiple of ``num_blocks``."""

    @classmethod
    def of(cls, groups: Groups, block_size: int, checkpoint_every: int) -> StoreChunks:
        """Return the layout for this block size. checkpoint_every: tokens between states, rounded up to blocks."""
        every = -(-checkpoint_every // block_size)
        most = max(1, RUN_TOKENS // block_size)
        return cls(groups, max(size for size in range(1, min(most, every) + 1) if every % size == 0), every)

    def length(self, group: int) -> int:
        """Return the number of blocks per name of a group."""
        return self.every if self.groups.all[group].is_state else self.num_blocks

    def chains(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return, per group, the names of all chunks of these blocks, in token order."""
        return [
            [key_of(digest, group) for digest in digests[self.length(group) - 1 :: self.length(group)]]
            for group in range(len(self.groups.all))
        ]

    def keys(self, digests: Sequence[bytes], group: int, index: int) -> list[bytes]:
        """Return the keys of the blocks of a group's chunk; the last one is its name."""
        end = (index + 1) * self.length(group)
        begin = end - 1 if self.groups.all[group].is_state else end - self.num_blocks
        return [key_of(digest, group) for digest in digests[begin:end]]
