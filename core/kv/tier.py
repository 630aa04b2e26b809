"""Core half of a KV back end (*tier*): storage that outlives the device's blocks.

      device block ── completed ──▶ back end ── fetch ──▶ pending ──▶ fetched: host block ── a plan ──▶ device block

A request with a pending lookup or fetch stays queued, and others pass it. What a back end lacks, loses or delivers too
late is computed.

Contents are named by prefix cache keys (`quintet.core.kv.prefix`). The executor ensures that all contents of a back end
belong to one model and layout, and verifies each block.

Subclasses know what a back end holds and what it costs. `quintet.core.features.kv_connector` decides what to fetch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from quintet.core.kv.chunks import Chunks
from quintet.core.kv.groups import Groups
from quintet.core.kv.prefetch import FetchCost, Prefetches
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import (
    Fetch,
    FileRequest,
    KvTierRequests,
    KvTierResults,
    Store,
    TierCapacity,
    TierName,
)

Source = tuple[bytes, int, int]
"""Location of a block: source, position in it, number of its blocks (`quintet.wire.kv_tiers.Fetch`)."""


class Wanted(msgspec.Struct, frozen=True):
    """Blocks with which a waiting request could start."""

    request_id: int
    rank: tuple[int, int]
    """Order of waiting requests."""
    num_blocks: int
    """Full blocks before its last token."""
    peer: str = ""
    """Server that has computed the prompt, ``host:port``."""
    num_offered: int = 0
    """Blocks that this server has."""


@dataclass(eq=False)
class Tier:
    """Contents and transfers of one back end. Subclasses add their state in ``__post_init__``."""

    name: ClassVar[TierName]
    is_local: ClassVar[bool] = False
    """True: plans copy its blocks; it has no messages."""
    does_wait: ClassVar[bool] = False
    """True: requests wait for free host blocks. Otherwise they are computed when these are short."""
    groups: Groups
    checkpoint_every: int
    """Tokens between states of recurrent layers."""
    first_host_block: int
    """Number of the first host block; fetches are written into them."""
    capacity: TierCapacity

    def __post_init__(self) -> None:
        self.chunks = Chunks(self.groups)
        self.fetches = Prefetches(self.first_host_block, self.capacity.num_staging_blocks)
        self.fetch_cost = FetchCost()
        """Cost of fetching an object."""
        self.due: OrderedDict[bytes, list[bytes]] = OrderedDict()
        """Objects to store, not sent yet: name -> keys of their blocks."""
        self.storing: dict[bytes, int] = {}
        """Objects being stored: name -> number of blocks."""
        self.held: Mapping[bytes, object] = {}
        """Keys of the blocks that the back end holds until the core drops them."""
        self.pinned: Container[bytes] = ()
        """Block keys excluded from eviction."""
        self.file_requests: list[FileRequest] = []
        """Operations on exported prefix files, not sent yet."""
        self.is_paused = False
        """The back end gets no requests for a while."""
        self._fetches: dict[bytes, tuple[int, list[tuple[int, int, bytes]]]] = {}
        """Fetches not sent yet: source -> number of its blocks; positions, host blocks and keys."""

    # --- storing ---

    def completed(self, digests: Sequence[bytes], first: int, end: int) -> None:
        """Queue the objects completed by a request's token blocks ``first`` to ``end``.

        digests: of all blocks before ``end``.
        """
        length = self.chunks.num_blocks
        for index in range(first // length, end // length):
            for group in self.groups.tokens:
                self.store(self.chunks.keys(digests, group, index))

    def completed_state(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """Queue the states after the first ``num_blocks`` blocks of a request."""
        index, rest = divmod(num_blocks, self.chunks.every)
        if index and not rest:
            for group in self.groups.states:
                self.store(self.chunks.keys(digests, group, index - 1))

    def store(self, keys: list[bytes]) -> None:
        """Queue an object with these blocks, unless the back end has it. Stored if no block is evicted before.

        The default stores nothing.
        """

    def save(self, request_id: int, keys: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        """Reserve space for contents with which a preempted request resumes; return those to copy (`on_evict`)."""
        return ()

    def on_evict(self, key: bytes, block: int) -> None:
        """Called before the device overwrites ``block``; the copies of the next plan still read the old content."""

    def take_copies(self) -> list[int]:
        """Return pairs ``device block, host block`` for the plan being sent: all since the previous one."""
        return []

    def offer(self, keys: Sequence[bytes]) -> None:
        """Queue the blocks of a prompt that other servers will fetch; the device has them until the next plan."""

    def hold(self, keys: Sequence[bytes]) -> None:
        """Register contents at start, least recently used first."""

    def reserve(self, key: bytes) -> bool:
        """Reserve space for a content that is not held; return False when none can be freed."""
        return False

    def give_up(self, keys: Sequence[bytes]) -> None:
        """Free the space of contents that were not written."""

    def drop(self, key: bytes) -> None:
        """Delete a content, held or being written."""

    def take_stores(self, block_of: Mapping[bytes, int]) -> list[Store]:
        """Return the queued objects to send now. block_of: device blocks by key."""
        contents = [(key, block_of[key]) for key in self.due if key in block_of]
        self.due.clear()
        if not contents:
            return []
        return [Store(pack_i32(block for _, block in contents), [key for key, _ in contents])]

    # --- fetching ---

    def max_blocks(self, wanted: Wanted) -> int:
        """Return the maximum number of a request's first blocks that the back end can provide; 0: no lookup."""
        return self.chunks.whole(wanted.num_blocks)

    def stays_queued(self, wanted: Wanted) -> bool:
        """Return True when host blocks are still short for a request that was refused before: no new lookup is needed."""
        return False

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source] | None:
        """Return the locations of the blocks that the back end has; None while the lookup is pending.

        digests: of the blocks after which the request could start. computing_ns: time to compute them.
        """
        return {}

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark these contents as recently used, in token order."""

    def is_cheaper(self, sources: Sequence[Source], computing_ns: int | None) -> bool:
        """Return True when fetching these blocks takes less time than computing, or nothing is measured yet."""
        return self.fetch_cost.is_cheaper(len(sources), computing_ns)

    def fetch(self, wanted: Wanted, sources: Mapping[bytes, Source], num_tokens: int, *, whole: bool) -> bool:
        """Fetch contents for a request: see `Prefetches.ask`. Return False when host blocks are short.

        sources: locations of the contents, in token order.
        """
        new = self.fetches.ask(wanted.request_id, [*sources], num_tokens, whole=whole)
        if new is None:
            return False
        for block, key in new:
            source, position, num_blocks = sources[key]
            self._fetches.setdefault(source, (num_blocks, []))[1].append((position, block, key))
        return True

    def forget(self, request_id: int) -> None:
        """Cancel a request's lookup and fetch: the plan under construction uses its blocks, or it has ended."""
        self.fetches.forget(request_id)

    @property
    def is_awaited(self) -> bool:
        """True while a request waits for a lookup or a fetch."""
        return self.fetches.is_awaited

    def expire(self, now_ns: int) -> None:
        """Cancel lookups and fetches past their deadline."""
        self.fetches.expire(now_ns)

    # --- messages ---

    def requests(
        self, tables_epoch: int, block_of: Mapping[bytes, int], now_ns: int
    ) -> KvTierRequests | None:
        """Return the transfers to send before the next plan. block_of: device blocks by key."""
        self.fetches.begin_requests(now_ns)
        fetches = []
        for source, (num_blocks, contents) in self._fetches.items():
            positions, host_blocks, keys = zip(*contents, strict=True)
            fetches.append(Fetch(source, num_blocks, pack_i32(positions), pack_i32(host_blocks), [*keys]))
        self._fetches.clear()
        requests = KvTierRequests(tables_epoch, self.name, self.take_stores(block_of), fetches)
        self.complete(requests, now_ns)
        return None if requests.is_empty else requests

    def complete(self, requests: KvTierRequests, now_ns: int) -> None:
        """Add requests that only some back ends have."""

    def apply(self, results: KvTierResults) -> None:
        """Apply results of transfers."""
        self.note_stored(results)
        self.fetches.settle(unpack_i32(results.fetched), missed=False)
        self.note_lost([*self.fetches.settle(unpack_i32(results.missed), missed=True), *results.lost])
        if results.num_fetches:
            self.fetch_cost.note(results.num_fetches, results.fetch_ns)

    def note_stored(self, results: KvTierResults) -> None:
        """Note the objects that were stored, or not."""

    def note_lost(self, names: Sequence[bytes]) -> None:
        """Note objects and blocks that the back end does not have."""

    def check(self, waiting: set[int]) -> None:
        """Assert every invariant; ``waiting``: the requests that may want contents."""
        self.fetches.check(waiting)
