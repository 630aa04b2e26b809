"""Messages between core and executor about KV tiers: disk, other servers, shared store.

Users of disk and peer messages: `quintet.core.kv.disk_pool` and `quintet.core.kv.peer_pool`. A *place* is space for
one block on disk, a number below `quintet.wire.step.Capacity.num_disk_blocks`. A block's *key* names its content: the
chained hash of its tokens and all before them, and its group of layers. Every message names its tables; the receiver
drops messages for other tables.

Messages about a shared KV store are inside `KvTierRequests` and `KvTierResults`. Users: `quintet.core.kv.store_pool`
and `quintet.executor.kv_transfer.features.kv_store`. A *chunk* is a sequence of blocks of one group, or one state. It
is stored as one object under the key of its last block, which covers all tokens up to there.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Put(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: store a chunk."""

    blocks: bytes
    """int32: device blocks"""
    keys: list[bytes]
    """Key of each block; the last one names the chunk."""


class Search(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: count the chunks that are present."""

    request_id: int
    chains: list[list[bytes]]
    """Chunk names by group, in token order; each chain is searched up to the first absent chunk."""


class Get(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: fetch blocks of a chunk."""

    name: bytes
    num_blocks: int
    """Blocks in the chunk."""
    positions: bytes
    """int32: wanted positions in the chunk."""
    host_blocks: bytes
    """int32: destinations."""
    keys: list[bytes]


class StoreRequests(msgspec.Struct, array_like=True, gc=False):
    """Core to executor: chunks to store, to search and to fetch."""

    puts: list[Put] = []
    searches: list[Search] = []
    gets: list[Get] = []

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to do."""
        return not (self.puts or self.searches or self.gets)


class LookupResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreResults`: result of a search."""

    request_id: int
    counts: bytes
    """int32: number of leading chunks of each chain that are present."""


class StoreResults(msgspec.Struct, array_like=True, gc=False):
    """Executor to core: results of store requests."""

    kept: list[bytes] = []
    """Names of stored chunks."""
    unkept: list[bytes] = []
    """Names of chunks that were not stored: the store is full, slow or unreachable."""
    found: list[LookupResult] = []
    search_ns: int = 0
    """Total time of the searches that the store answered."""
    fetched: bytes = b""
    """int32: host blocks that hold the requested content."""
    missed: bytes = b""
    """int32: host blocks that do not."""
    lost: list[bytes] = []
    """Names of chunks that were absent or damaged."""
    num_gets: int = 0
    """Number of chunks fetched."""
    get_ns: int = 0
    """Time during which any of these was in progress."""
    num_searches: int = 0
    """Number of searches that the store answered."""


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
