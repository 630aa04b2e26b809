"""Format of a chunk of blocks in a store.

    head | entry of each block | block | block | …          blocks as in KV memory, layer by layer

The head has the portable identity (`quintet.executor.kv_transfer.kv_identity.whole_of`), the number of blocks and
their size. An entry has a block's key, and a SHA-256 over identity, key and bytes, which every read verifies. Hashes
detect accidents, not attacks: every writer of a store is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quintet.executor.kv_transfer.block_bytes import Bytes
from quintet.executor.kv_transfer.kv_identity import digest_of

MAGIC = b"quintet KV run 1\n"
HEAD = struct.Struct("<20s32sQI")
"""Magic, identity, bytes of a block, number of blocks."""
ENTRY = struct.Struct("<B34s32s")
"""Length of the key, key, hash of the block."""


def entry_of(identity: bytes, key: bytes, block: memoryview) -> bytes:
    return ENTRY.pack(len(key), key, digest_of(identity, key, block))


@dataclass(slots=True, frozen=True)
class ChunkFormat:
    """Format of chunks of one model's blocks."""

    identity: bytes
    block_bytes: int

    def name_of(self, key: bytes) -> str:
        """Return the name of the chunk that ends with the block of this key; unique across identities."""
        return f"{self.identity.hex()[:32]}/{key.hex()}"

    def size(self, num_blocks: int) -> int:
        """Return the size in bytes of a chunk with this number of blocks."""
        return HEAD.size + num_blocks * (ENTRY.size + self.block_bytes)

    def new(self, num_blocks: int) -> tuple[Bytes, Bytes]:
        """Return memory for a chunk, ``[size]``, and a view of its blocks, ``[num_blocks, block_bytes]``."""
        content: Bytes = np.empty(self.size(num_blocks), np.uint8)
        return content, content[HEAD.size + num_blocks * ENTRY.size :].reshape(num_blocks, -1)

    def finish(self, content: Bytes, blocks: Bytes, keys: Sequence[bytes]) -> None:
        """Write head and entries before the blocks, which must be complete."""
        head = HEAD.pack(MAGIC, self.identity, self.block_bytes, len(keys))
        entries = [entry_of(self.identity, key, block.data) for key, block in zip(keys, blocks, strict=True)]
        before = head + b"".join(entries)
        content[: len(before)] = np.frombuffer(before, np.uint8)

    def is_block(self, content: Bytes, blocks: Bytes, position: int, key: bytes) -> bool:
        """Return whether the block at this position has this key and is intact."""
        magic, identity, block_bytes, num_blocks = HEAD.unpack_from(content.data)
        if (magic.rstrip(b"\0"), identity, block_bytes) != (MAGIC, self.identity, self.block_bytes):
            return False
        if num_blocks != len(blocks):
            return False
        length, found, digest = ENTRY.unpack_from(content.data, HEAD.size + position * ENTRY.size)
        return bool(found[:length] == key and digest == digest_of(self.identity, key, blocks[position].data))
