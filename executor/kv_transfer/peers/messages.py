"""Protocol for blocks between two servers over ZeroMQ: a DEALER sends requests, a ROUTER replies.

    client                                 server
    Ask 7: key a                 ──────▶
    Ask 8: key b                 ──────▶
                                 ◀──────   BlockReply 7 | block
                                 ◀──────   BlocksMissing 8
    Ask 9: key, other identity   ──────▶
                                 ◀──────   IdentityMismatch 9: the server's identity parts

Every message is one frame; a block is a second frame. A block's digest covers identity, key and bytes, as on disk, so
no block is accepted by accident. `quintet.executor.kv_transfer.peers.keys` authenticates connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from quintet.executor.kv_transfer.peers.keys import PeerKey
from quintet.wire.kv_tiers import KEY_BYTES

VERSION = 2
MAX_HEAD_BYTES = 64 << 10
WINDOW_BYTES = 8 << 20
"""Bytes of blocks that a client has requested and not received, unless a block is larger."""
MAX_REQUESTS = 512


def max_requests(block_bytes: int) -> int:
    """Return the maximum number of requests in flight per client: at least two, so that the server always has the next one."""
    return max(2, min(MAX_REQUESTS, WINDOW_BYTES // block_bytes))


@dataclass(slots=True, frozen=True)
class OwnIdentity:
    """Key and identity that servers which exchange blocks share; see `quintet.executor.kv_transfer.kv_identity`."""

    key: PeerKey
    identity: bytes
    parts: Mapping[str, str]


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    version: int
    number: int
    identity: bytes
    keys: list[bytes]
    """One key."""

    @property
    def is_valid(self) -> bool:
        """True for one key, or another version: its client gets an `IdentityMismatch`."""
        return self.version != VERSION or (len(self.keys) == 1 and len(self.keys[0]) in KEY_BYTES)


class BlockReply(msgspec.Struct, array_like=True, tag="given"):
    """The requested block, which is the next frame."""

    number: int
    index: int
    """0: of the only key."""
    digest: bytes


class BlocksMissing(msgspec.Struct, array_like=True, tag="lacking"):
    """The server does not have the block of the only key, 0."""

    number: int
    indexes: list[int]


class IdentityMismatch(msgspec.Struct, array_like=True, tag="foreign"):
    """The server's identity differs; its parts by name, as hashes."""

    number: int
    parts: dict[str, str]


Answer = BlockReply | BlocksMissing | IdentityMismatch
