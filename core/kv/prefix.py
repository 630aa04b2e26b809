"""Which block holds which tokens: a map from a chain of hashes to blocks.

The key of a block is the SHA-256 of the key of the block before it and of its own tokens, and the chain begins with
the hash of the request's cache salt. Equal keys therefore mean equal tokens from the first position on, and the same
salt; a collision would be one of SHA-256.
"""

from __future__ import annotations

from array import array
from hashlib import sha256


def salt_digest(salt: str) -> bytes:
    """Return the start of the chain for requests of this salt."""
    return sha256(b"quintet.kv\0" + salt.encode()).digest()


def extend_chain(
    digests: list[bytes], start: bytes, tokens: list[int], block_size: int, num_blocks: int
) -> None:
    """Bring ``digests`` to ``num_blocks`` entries: the keys of the first full blocks of ``tokens``."""
    for index in range(len(digests), num_blocks):
        before = digests[-1] if digests else start
        block = tokens[index * block_size : (index + 1) * block_size]
        digests.append(sha256(before + array("i", block).tobytes()).digest())


class PrefixIndex:
    """Keys of the blocks with known content. One block per key, one key per block."""

    __slots__ = ("block_of", "key_of")

    def __init__(self) -> None:
        self.block_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}

    def holds(self, block: int) -> bool:
        """Return whether the block's content is known."""
        return block in self.key_of

    def register(self, key: bytes, block: int) -> None:
        """Make a full block findable, unless its content already is in another block."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key

    def forget(self, block: int) -> bytes:
        """Remove a block that is about to get new content; return the key of what it holds."""
        key = self.key_of.pop(block)
        del self.block_of[key]
        return key

    def longest(self, keys: list[bytes], max_blocks: int) -> list[int]:
        """Return the blocks of the longest known chain, at most ``max_blocks`` of them."""
        found: list[int] = []
        block_of = self.block_of
        for key in keys[:max_blocks]:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found
