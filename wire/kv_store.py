"""Messages between core and executor about a shared KV store, inside `KvTierRequests` and `KvTierResults`.

Users: `quintet.core.kv.store_pool` and `quintet.executor.kv_transfer.features.kv_store`. A *chunk* is a sequence of
blocks of one group, or one state. It is stored as one object under the key of its last block, which covers all tokens
up to there.
"""

from __future__ import annotations

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
