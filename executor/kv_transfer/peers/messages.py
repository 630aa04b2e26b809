"""What two servers say to each other of blocks, over ZeroMQ: a DEALER asks, a ROUTER answers.

    who wants                              who offers
    Ask 7: keys a, b, c          ──────▶
                                 ◀──────   BlockReply 7, of a   | block
                                 ◀──────   BlockReply 7, of c   | block
                                 ◀──────   BlocksMissing 7: b
    Ask 8: keys, other whose     ──────▶
                                 ◀──────   IdentityMismatch 8: what the blocks depend on here

Every message is one frame; the block follows as another. A block's digest is over whose it is, its key and its bytes, as on
disk: nothing is taken by accident for what it is not. Who speaks is a matter of `quintet.executor.kv_transfer.peers.keys`.
"""

from __future__ import annotations

import msgspec

VERSION = 1
MAX_KEYS = 256
"""In one question."""
KEY_BYTES = (32, 34)
MAX_HEAD_BYTES = 64 << 10
WINDOW_BYTES = 4 << 20
"""Of blocks that one question asks for."""
MAX_QUESTIONS = 2
"""Of one who asks, that wait for answers: while one is answered the next is there."""


def window_of(block_bytes: int) -> int:
    """Return how many blocks one question asks for at most."""
    return max(1, min(MAX_KEYS, WINDOW_BYTES // block_bytes))


def most_unread(block_bytes: int) -> int:
    """Return how many answers may wait for one who asks, and be unread by it: those of all its questions."""
    return MAX_QUESTIONS * (window_of(block_bytes) + 1)


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """May I have these?"""

    version: int
    number: int
    whose: bytes
    keys: list[bytes]

    @property
    def makes_sense(self) -> bool:
        """Whether somebody like us may have sent it."""
        return len(self.keys) <= MAX_KEYS and all(len(key) in KEY_BYTES for key in self.keys)


class BlockReply(msgspec.Struct, array_like=True, tag="given"):
    """Here is one of those that you asked for, by its place among them."""

    number: int
    index: int
    digest: bytes


class BlocksMissing(msgspec.Struct, array_like=True, tag="lacking"):
    """These are not here (any more). The last answer to every question."""

    number: int
    indexes: list[int]


class IdentityMismatch(msgspec.Struct, array_like=True, tag="foreign"):
    """What is here might have other bits. By name, hashes of all that these depend on."""

    number: int
    parts: dict[str, str]


Answer = BlockReply | BlocksMissing | IdentityMismatch
