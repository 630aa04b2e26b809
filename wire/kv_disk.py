"""Messages between core and executor about KV blocks on disk and exchanged with other servers.

Users: `quintet.core.kv.disk_pool` and `quintet.core.kv.peer_pool`. A *place* is space for one block on disk, a number
below `quintet.wire.step.Capacity.num_disk_blocks`. A block's *key* names its content: the chained hash of its tokens
and all before them, and its group of layers. Every message names its tables; the receiver drops messages for other
tables.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.wire.kv_store import StoreRequests, StoreResults

KEY_BYTES = (32, 34)
"""Bytes of a key of the first group, and of any other."""

MAX_KEPT = 1 << 15
"""Maximum places in one `StoredBlocks`."""


class Pull(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: contents to fetch from one peer."""

    peer: str
    """``host:port``"""
    host_blocks: bytes
    """int32"""
    keys: list[bytes]


EXCHANGE = "exchange"
"""Folder of exported prefix files, next to the folders of the engines."""

FileVerb = Literal["export", "look", "import"]


class FileRequest(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: export blocks to a file, list a file's blocks, or import them."""

    task_id: int
    verb: FileVerb
    name: str
    """File name in the executor's exchange folder."""
    places: bytes = b""
    """int32"""
    keys: list[bytes] = []


class FileResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierResults`: a file task has ended. Blocks of an import are also reported as stored or unstored."""

    task_id: int
    error: str = ""
    keys: list[bytes] = []
    """Keys in the file, for a listing; for an import, the keys that could not be stored."""
    num_bytes: int = 0
    """Size of the exported file."""


class KvTierRequests(msgspec.Struct, array_like=True, tag="kv_orders", gc=False):
    """Core to executor: blocks to store, offer and fetch.

    Ordered with the plans: blocks hold the content that earlier plans wrote.
    """

    tables: int
    """`quintet.wire.step.Capacity.tables`"""
    stores: bytes = b""
    """int32 pairs ``device block, place``"""
    store_keys: list[bytes] = []
    fetches: bytes = b""
    """int32 pairs ``place, host block``"""
    fetch_keys: list[bytes] = []
    drops: bytes = b""
    """int32: places to free, before anything is stored."""
    drop_keys: list[bytes] = []
    offers: bytes = b""
    """int32: device blocks offered to peers."""
    offer_keys: list[bytes] = []
    pulls: list[Pull] = []
    files: list[FileRequest] = []
    store: StoreRequests | None = None

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to do."""
        keys = self.store_keys or self.fetch_keys or self.drop_keys or self.offer_keys
        return not (keys or self.pulls or self.files or self.store)


class KvTierResults(msgspec.Struct, array_like=True, tag="kv_answers", gc=False):
    """Executor to core: results of transfers."""

    executor_epoch: int
    tables: int
    stored: list[bytes] = []
    """Keys of stored blocks."""
    unstored: list[bytes] = []
    """Keys of blocks that were not stored because the disk is slow or full. Their places are empty."""
    fetched: bytes = b""
    """int32: host blocks that hold the requested content."""
    missed: bytes = b""
    """int32: host blocks that do not: it was absent or damaged."""
    fetch_ns: int = 0
    """Total read time."""
    pulled: bytes = b""
    """int32: host blocks that hold the content from peers."""
    lacking: bytes = b""
    """int32: host blocks that do not: no peer with the same bits had it, or none answered."""
    files: list[FileResult] = []
    store: StoreResults | None = None


class StoredBlocks(msgspec.Struct, array_like=True, tag="kv_kept", gc=False):
    """Executor to core, before its `quintet.wire.step.Capacity`: part of the disk's contents at start."""

    executor_epoch: int
    tables: int
    places: bytes
    """int32, least recently used first"""
    keys: list[bytes]


class DiskResultsReady(msgspec.Struct, array_like=True, tag="disk_rang", gc=False):
    """A thread for disk or peers posts results to the executor's loop. Not sent between processes."""

    count: int
