"""Protocol for blocks between two servers over ZeroMQ: a DEALER sends requests, a ROUTER replies.

    client                                 server
    Ask 7: keys a, b, c          ──────▶
                                 ◀──────   BlockReply 7, of a   | block
                                 ◀──────   BlockReply 7, of c   | block
                                 ◀──────   BlocksMissing 7: b
    Ask 8: keys, other identity  ──────▶
                                 ◀──────   IdentityMismatch 8: the server's identity parts

Every message is one frame; a block is a second frame. A block's digest covers identity, key and bytes, as on disk, so
no block is accepted by accident. `quintet.executor.kv_transfer.peers.keys` authenticates connections.
"""

from __future__ import annotations

import msgspec

from quintet.wire.kv_tiers import KEY_BYTES

VERSION = 1
MAX_KEYS = 256
"""Maximum keys per request."""
MAX_HEAD_BYTES = 64 << 10
WINDOW_BYTES = 4 << 20
"""Maximum bytes of blocks per request."""
MAX_REQUESTS = 2
"""Requests in flight per client, so that the server always has the next one."""


def window_of(block_bytes: int) -> int:
    """Return the maximum number of blocks per request."""
    return max(1, min(MAX_KEYS, WINDOW_BYTES // block_bytes))


def max_unread_replies(block_bytes: int) -> int:
    """Return the maximum number of unread replies to a client: those of all its requests in flight."""
    return MAX_REQUESTS * (window_of(block_bytes) + 1)


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """A request for blocks."""

    version: int
    number: int
    identity: bytes
    keys: list[bytes]

    @property
    def is_valid(self) -> bool:
        """True if the request is within the protocol's limits."""
        return len(self.keys) <= MAX_KEYS and all(len(key) in KEY_BYTES for key in self.keys)


class BlockReply(msgspec.Struct, array_like=True, tag="given"):
    """A requested block, by its index in the request; the block is the next frame."""

    number: int
    index: int
    digest: bytes


class BlocksMissing(msgspec.Struct, array_like=True, tag="lacking"):
    """Indexes of blocks that the server does not have; the last reply to every request."""

    number: int
    indexes: list[int]


class IdentityMismatch(msgspec.Struct, array_like=True, tag="foreign"):
    """The server's identity differs; its parts by name, as hashes."""

    number: int
    parts: dict[str, str]


Answer = BlockReply | BlocksMissing | IdentityMismatch
