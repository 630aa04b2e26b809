"""What core and executor tell each other of a store that other servers share: inside `KvOrders` and `KvAnswers`
(`quintet.core.kv.store_pool`, `quintet.executor.kv_transfer.features.kv_store`).

A *run* is so many consecutive blocks of one group, or one state. It is kept as one object, under the key of its last block: that
names all tokens up to there, and so what every block before it holds.
"""

from __future__ import annotations

import msgspec


class Put(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: keep a run."""

    blocks: bytes
    """int32: device blocks"""
    keys: list[bytes]
    """Of each; the last one names the run."""


class Search(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: how many of these runs are there?"""

    request_id: int
    chains: list[list[bytes]]
    """Names of runs by group, in the order of their tokens; of each chain the first ones are looked for, up to one that lacks."""


class Get(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreRequests`: bring blocks of a run."""

    name: bytes
    num_blocks: int
    """That the run has."""
    positions: bytes
    """int32: which of them are wanted."""
    host_blocks: bytes
    """int32: where they go."""
    keys: list[bytes]


class StoreRequests(msgspec.Struct, array_like=True, gc=False):
    """Core to executor: keep these runs, look for those, and bring others."""

    puts: list[Put] = []
    searches: list[Search] = []
    gets: list[Get] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.puts or self.searches or self.gets)


class LookupResult(msgspec.Struct, array_like=True, gc=False):
    """Inside `StoreResults`: what a search has found."""

    request_id: int
    counts: bytes
    """int32: how many of the first runs of each chain are there."""


class StoreResults(msgspec.Struct, array_like=True, gc=False):
    """Executor to core: what became of orders."""

    kept: list[bytes] = []
    """Names of runs that are there now."""
    unkept: list[bytes] = []
    """Names of those that are not: the store is full, slow, or not there."""
    found: list[LookupResult] = []
    search_ns: int = 0
    """How long searches took that the store answered, together."""
    fetched: bytes = b""
    """int32: host blocks that hold what was ordered."""
    missed: bytes = b""
    """int32: host blocks that do not."""
    lost: list[bytes] = []
    """Names of runs that were not there, or not whole."""
    num_gets: int = 0
    """Runs that were brought."""
    get_ns: int = 0
    """How long any of these was on its way."""
    num_searches: int = 0
    """Searches that the store answered."""
