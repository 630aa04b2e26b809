"""Messages between core and executor about KV back ends (disk, other servers, shared store), and about pins.

All back ends have the same two messages, `KvTierRequests` and `KvTierResults`, tagged with the back end (*tier*). A
block's *key* names its content: the chained hash of its tokens and all before them, and its group of layers. An
*object* is what a back end stores and fetches as a whole, under the key of its last block:

| Tier | Object | `Fetch.source` | `Fetch.positions` |
|---|---|---|---|
| disk | a block | empty | unused |
| peer | a block | ``host:port`` of the peer | unused |
| store | a *chunk*: consecutive blocks of a group, or one state | key of the chunk | positions in the chunk |

Every message of a back end names its tables; the receiver drops messages for other tables. Users: `quintet.core.kv.tier` and
`quintet.executor.kv_transfer.back_end`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["host", "disk", "peer", "store"]
"""Host memory (swap space) has no messages: its transfers are columns of plans."""


class TierCapacity(msgspec.Struct, array_like=True, gc=False):
    """Inside `quintet.wire.step.Capacity`: size of a back end."""

    tier: TierName
    num_staging_blocks: int
    """Host blocks for fetches."""
    num_places: int = 0
    """Disk, host memory: number of blocks that it can hold. The core decides which."""
    max_storing_blocks: int = 0
    """Store: number of blocks, plus one object, that may be in transfer to it."""


class Store(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: store blocks. For a store they are one object."""

    blocks: bytes
    """int32: device blocks"""
    keys: list[bytes]
    """Key of each block; the last one names the object."""


class Fetch(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: fetch blocks of one source."""

    source: bytes
    num_blocks: int
    """Limit of the positions: blocks in the source."""
    positions: bytes
    """int32"""
    host_blocks: bytes
    """int32: destinations."""
    keys: list[bytes]


class Search(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: count the objects that are present."""

    request_id: int
    chains: list[list[bytes]]
    """Names of objects by group, in token order; each chain is searched up to the first absent one."""


class SearchResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierResults`: result of a search."""

    request_id: int
    counts: bytes
    """int32: number of leading objects of each chain that are present."""


KEY_BYTES = (32, 34)
"""Bytes of a key of the first group, and of any other."""

MAX_KEPT = 1 << 15
"""Maximum names in the results that report contents at start."""

EXCHANGE = "exchange"
"""Folder of exported prefix files, next to the folders of the engines."""

FileVerb = Literal["export", "look", "import"]


class FileRequest(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: export blocks to a file, list a file's blocks, or import them."""

    task_id: int
    verb: FileVerb
    name: str
    """File name in the executor's exchange folder."""
    keys: list[bytes] = []


class FileResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierResults`: a file task has ended. Blocks of an import are also reported as stored or unstored."""

    task_id: int
    error: str = ""
    keys: list[bytes] = []
    """Keys in the file, for a listing; for an import, the keys that could not be stored."""
    num_bytes: int = 0
    """Size of the exported file."""


class KvTierRequests(msgspec.Struct, array_like=True, tag="kv_requests", gc=False):
    """Core to executor: transfers of one back end.

    Ordered with the plans: blocks hold the content that earlier plans wrote.
    """

    tables_epoch: int
    """`quintet.wire.step.Capacity.tables_epoch`"""
    tier: TierName
    stores: list[Store] = []
    fetches: list[Fetch] = []
    searches: list[Search] = []
    drops: list[bytes] = []
    """Keys of blocks to delete, before anything is stored."""
    files: list[FileRequest] = []

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to do."""
        return not (self.stores or self.fetches or self.searches or self.drops or self.files)


class KvTierResults(msgspec.Struct, array_like=True, tag="kv_results", gc=False):
    """Executor to core: results of one back end's transfers. Before `quintet.wire.step.Capacity`: its contents at start."""

    executor_epoch: int
    tables_epoch: int
    tier: TierName
    stored: list[bytes] = []
    """Names of stored objects; of contents at start, least recently used first."""
    unstored: list[bytes] = []
    """Names of objects that were not stored: the back end is full, slow or unreachable."""
    fetched: bytes = b""
    """int32: host blocks that hold the requested content."""
    missed: bytes = b""
    """int32: host blocks that do not: it was absent or damaged, or no peer answered."""
    lost: list[bytes] = []
    """Names of requested objects that were absent or damaged."""
    num_fetches: int = 0
    """Number of objects fetched."""
    fetch_ns: int = 0
    """Time during which any of these was in progress."""
    found: list[SearchResult] = []
    num_searches: int = 0
    """Number of searches that the back end answered."""
    search_ns: int = 0
    """Total time of these."""
    files: list[FileResult] = []


class TierResultsReady(msgspec.Struct, array_like=True, tag="kv_ready", gc=False):
    """A thread of a back end posts results to the executor's loop. Not sent between processes."""

    count: int


class KvPin(msgspec.Struct, array_like=True, gc=False):
    """A pinned prefix."""

    digest: bytes
    """Digest of its last block, which names the pin."""
    num_tokens: int
    keys: list[bytes]
    """Block keys that a request needs to continue after the prefix."""


class KvPins(msgspec.Struct, array_like=True, tag="kv_pins", gc=False):
    """Core to executor: all pinned prefixes. Executor to a new core, before `Capacity`: so pins survive the loss of
    either process.
    """

    pins: list[KvPin]
