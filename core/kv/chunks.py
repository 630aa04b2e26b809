"""Objects in which a KV back end stores blocks.

An object of a token group is a *chunk* of consecutive blocks. An object of a state group is one state, of those after
every so many blocks:

    blocks of a group   | 0 … 15 | 16 … 31 | 32 … 47 | 48 …      chunks of 16 blocks of 16 tokens
    name: key of block         15        31        47
    states                                           64          one after every 64 blocks

A disk stores single blocks. For an object store these would be small: it takes as long to start a request as to
transfer a megabyte. One object per prompt could not be shared. The chunk size follows from the block size alone, so
all servers agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefix import key_of

CHUNK_TOKENS = 256
"""Maximum tokens of a chunk, at least one block: 3 MB for a model of 0.5 billion parameters, 32 MB for 8 billion."""


@dataclass(slots=True, frozen=True)
class Chunks:
    """Object layout of one model."""

    groups: Groups
    num_blocks: int = 1
    """Blocks per chunk of a token group."""
    every: int = 1
    """Blocks between stored states: a multiple of ``num_blocks``."""

    @classmethod
    def of(cls, groups: Groups, checkpoint_every: int) -> Chunks:
        """Return the layout of a store. checkpoint_every: tokens between states, rounded up to blocks."""
        block_size = groups.spec.block_size
        every = -(-checkpoint_every // block_size)
        most = max(1, CHUNK_TOKENS // block_size)
        return cls(groups, max(size for size in range(1, min(most, every) + 1) if every % size == 0), every)

    def length(self, group: int) -> int:
        """Return the number of blocks per name of a group."""
        return self.every if self.groups.all[group].is_state else self.num_blocks

    def whole(self, num_blocks: int) -> int:
        """Return the number of a request's first blocks after which it can start from complete objects."""
        step = self.every if self.groups.states else self.num_blocks
        return num_blocks // step * step

    def chains(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return, per group, the names of all objects of these blocks, in token order."""
        return [
            [key_of(digest, group) for digest in digests[self.length(group) - 1 :: self.length(group)]]
            for group in range(len(self.groups.all))
        ]

    def all_keys(self, digests: Sequence[bytes]) -> Iterator[bytes]:
        """Return the keys of these blocks in all groups."""
        return (key_of(digest, group) for digest in digests for group in range(len(self.groups.all)))

    def keys(self, digests: Sequence[bytes], group: int, index: int) -> list[bytes]:
        """Return the keys of the blocks of a group's object; the last one is its name."""
        end = (index + 1) * self.length(group)
        begin = end - 1 if self.groups.all[group].is_state else end - self.num_blocks
        return [key_of(digest, group) for digest in digests[begin:end]]
