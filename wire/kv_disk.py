"""What core and executor tell each other of blocks that are kept on disk, and of those that go to other servers and come from
there (`quintet.core.kv.disk_pool`, `quintet.core.kv.peer_pool`).

A *place* is room for one block on disk, a number below `quintet.wire.step.Capacity.num_disk_blocks`. A block's *key* names its
content: the chained hash of its tokens and all before them, and its group of layers. Every message names the tables that it is
about; one that is about others is dropped, and nobody waits for it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.wire.kv_store import StoreRequests, StoreResults

KEY_BYTES = (32, 34)
"""Of a key of the first group, and of any other."""

MAX_KEPT = 1 << 15
"""Places that one `StoredBlocks` tells of at most."""


class Pull(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: contents to fetch from one peer."""

    peer: str
    """``host:port``"""
    host_blocks: bytes
    """int32"""
    keys: list[bytes]


EXCHANGE = "exchange"
"""The folder, beside those of the engines, of prefixes in files of their own."""

FileVerb = Literal["export", "look", "import"]


class FileRequest(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierRequests`: write blocks into a file of their own, say what one has, or have places hold blocks of one."""

    task_id: int
    verb: FileVerb
    name: str
    """In the folder for such files, which the executor knows."""
    places: bytes = b""
    """int32"""
    keys: list[bytes] = []


class FileResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `KvTierResults`: a file's task has ended. Blocks of an import are told of as stored, or unstored."""

    task_id: int
    error: str = ""
    keys: list[bytes] = []
    """What the file has, where that was asked; of an import what could not be stored."""
    num_bytes: int = 0
    """Of the file that was written."""


class KvTierRequests(msgspec.Struct, array_like=True, tag="kv_orders", gc=False):
    """Core to executor: store these, offer those, and fetch others.

    Takes its turn among the plans: blocks hold what those before it wrote.
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
    """int32: places whose contents are to be forgotten, before anything is stored."""
    drop_keys: list[bytes] = []
    offers: bytes = b""
    """int32: device blocks whose contents peers may have."""
    offer_keys: list[bytes] = []
    pulls: list[Pull] = []
    files: list[FileRequest] = []
    store: StoreRequests | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        keys = self.store_keys or self.fetch_keys or self.drop_keys or self.offer_keys
        return not (keys or self.pulls or self.files or self.store)


class KvTierResults(msgspec.Struct, array_like=True, tag="kv_answers", gc=False):
    """Executor to core: what became of orders."""

    executor_epoch: int
    tables: int
    stored: list[bytes] = []
    """Keys of blocks that are on disk now."""
    unstored: list[bytes] = []
    """Keys of those that are not: the disk is too slow or full. Their places hold nothing."""
    fetched: bytes = b""
    """int32: host blocks that hold what was ordered."""
    missed: bytes = b""
    """int32: host blocks that do not: it was not there any more, or not whole."""
    fetch_ns: int = 0
    """How long reading took, of all of these."""
    pulled: bytes = b""
    """int32: host blocks that hold what was to come from peers."""
    lacking: bytes = b""
    """int32: host blocks that do not: no peer that computes the same bits had it, or none answered."""
    files: list[FileResult] = []
    store: StoreResults | None = None


class StoredBlocks(msgspec.Struct, array_like=True, tag="kv_kept", gc=False):
    """Executor to core, before the `quintet.wire.step.Capacity` that it belongs to: some of what the disk holds already."""

    executor_epoch: int
    tables: int
    places: bytes
    """int32, those that were used longest ago first"""
    keys: list[bytes]


class DiskResultsReady(msgspec.Struct, array_like=True, tag="disk_rang", gc=False):
    """A thread that reads and writes, or talks with peers, has answers: it tells the executor's loop. Never sent."""

    count: int
