"""What a run of blocks looks like in a store.

    head | entry of each block | block | block | …          as they lie in KV memory, layer by layer

The head says whose the blocks are (`quintet.executor.kv_transfer.kv_identity.whole_of`), how many, and of which size;
an entry has a block's key, and the SHA-256 of all three and of its bytes. Nothing is believed that does not have this
hash. Hashes tell accidents, not intent: who can write to a store is believed by all who read it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from quintet.executor.kv_transfer.block_bytes import Bytes
from quintet.executor.kv_transfer.kv_identity import digest_of

MAGIC = b"quintet KV run 1\n"
HEAD = struct.Struct("<20s32sQI")
"""Magic, whose, bytes of a block, number of blocks."""
ENTRY = struct.Struct("<B34s32s")
"""Length of the key, key, hash of the block."""


class RunFormat:
    """Runs of one model's blocks."""

    def __init__(self, whose: bytes, block_bytes: int) -> None:
        self.whose = whose
        self.block_bytes = block_bytes

    def name_of(self, key: bytes) -> str:
        """Return what the run is called whose last block has this key: no two models' runs are called alike."""
        return f"{self.whose.hex()[:32]}/{key.hex()}"

    def size(self, num_blocks: int) -> int:
        """Return the bytes of a run of so many blocks."""
        return HEAD.size + num_blocks * (ENTRY.size + self.block_bytes)

    def new(self, num_blocks: int) -> tuple[Bytes, Bytes]:
        """Return memory for a run, ``[size]``, and of it the blocks, ``[num_blocks, block_bytes]``."""
        content: Bytes = np.empty(self.size(num_blocks), np.uint8)
        return content, content[HEAD.size + num_blocks * ENTRY.size :].reshape(num_blocks, -1)

    def finish(self, content: Bytes, blocks: Bytes, keys: Sequence[bytes]) -> None:
        """Write what stands before the blocks, which are there."""
        head = HEAD.pack(MAGIC, self.whose, self.block_bytes, len(keys))
        entries = [
            ENTRY.pack(len(key), key, digest_of(self.whose, key, block.data))
            for key, block in zip(keys, blocks, strict=True)
        ]
        before = head + b"".join(entries)
        content[: len(before)] = np.frombuffer(before, np.uint8)

    def is_block(self, content: Bytes, blocks: Bytes, position: int, key: bytes) -> bool:
        """Return whether the block at this position is the one with this key, whole."""
        magic, whose, block_bytes, num_blocks = HEAD.unpack_from(content.data)
        if (magic.rstrip(b"\0"), whose, block_bytes) != (MAGIC, self.whose, self.block_bytes):
            return False
        if num_blocks != len(blocks):
            return False
        length, found, digest = ENTRY.unpack_from(content.data, HEAD.size + position * ENTRY.size)
        return bool(found[:length] == key and digest == digest_of(self.whose, key, blocks[position].data))
