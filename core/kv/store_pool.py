"""Store back end, core half: KV blocks in a store shared with other servers.

This process is not notified of other writers or of evictions. So the store is searched for a request's chunks first
(`quintet.core.kv.chunks`). Chunks found, or stored by this engine, are assumed present until a read misses:

      request ── search ──▶ found ── is it cheaper? ──▶ fetch ──▶ host block ── a plan ──▶ device block
                                                          │ missed: computed, and stored again

Blocks to store wait on the device while they are cached; the bytes copied to the host at once are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from quintet.core.kv.chunks import Chunks
from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS, FetchCost
from quintet.core.kv.tier import Source, Tier, Wanted
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, Search, Store

MAX_KNOWN = 1 << 18
"""Maximum number of chunks assumed present."""
MAX_DUE = 1 << 14
"""Maximum number of chunks that wait to be stored."""
MAX_NAMES = 1 << 16
"""Maximum chunk names per search message, plus those of one request."""
PAUSE_NS = 30_000_000_000
"""Time without requests to a store that missed its deadline."""


@dataclass(slots=True)
class Lookup:
    """Search of a waiting request."""

    chains: list[list[bytes]]
    """Names to search, by group: of its chunks from the first one that is not known to be present."""
    is_pending: bool
    deadline_ns: int | None = None
    """Time at which it is given up; None before it was sent."""


class StorePool(Tier):
    """Chunks assumed present, and searches."""

    name = "store"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chunks = Chunks.of(self.groups, self.checkpoint_every)
        self.known: OrderedDict[bytes, None] = OrderedDict()
        """Names of chunks assumed present, least recently used first."""
        self.lookups: dict[int, Lookup] = {}
        """Keyed by request."""
        self.search_cost = FetchCost()
        self._searches: list[Search] = []
        """Searches not sent yet."""
        self._paused_until_ns = 0

    # --- storing ---

    def store(self, keys: list[bytes]) -> None:
        name = keys[-1]
        if name in self.known:
            self.mark_present(name)
        elif name not in self.storing:
            self.due[name] = keys
            if len(self.due) > MAX_DUE:
                self.due.popitem(last=False)

    def mark_present(self, name: bytes) -> None:
        """Assume that the store has a chunk, as the most recently used one."""
        self.known.pop(name, None)
        self.known[name] = None
        if len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)

    def take_stores(self, block_of: Mapping[bytes, int]) -> list[Store]:
        """See `Tier.take_stores`. The other chunks stay queued."""
        stores = []
        num_storing = sum(self.storing.values())
        while self.due and num_storing < self.capacity.max_storing_blocks:
            name, keys = self.due.popitem(last=False)
            blocks = [block_of[key] for key in keys if key in block_of]
            if len(blocks) == len(keys):  # otherwise some were evicted
                self.storing[name] = len(blocks)
                num_storing += len(blocks)
                stores.append(Store(pack_i32(blocks), keys))
        return stores

    # --- fetching ---

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source] | None:
        """See `Tier.look_up`. No search if it takes longer than computing."""
        lookup = self.lookups.get(wanted.request_id)
        if lookup is None:
            if self.is_paused or not self.search_cost.is_cheaper(1, computing_ns):
                return {}
            lookup = self._search(wanted.request_id, digests)
        return None if lookup.is_pending else self._sources(digests)

    def _search(self, request_id: int, digests: Sequence[bytes]) -> Lookup:
        """Search for chunks that are not known to be present."""
        unknown = [[*dropwhile(self.known.__contains__, chain)] for chain in self.chunks.chains(digests)]
        self.lookups[request_id] = lookup = Lookup(unknown, is_pending=any(unknown))
        if lookup.is_pending:
            self._searches.append(Search(request_id, unknown))
        return lookup

    def _sources(self, digests: Sequence[bytes]) -> dict[bytes, Source]:
        found: dict[bytes, Source] = {}
        for group, chain in enumerate(self.chunks.chains(digests)):
            for index, _ in enumerate(takewhile(self.known.__contains__, chain)):
                keys = self.chunks.keys(digests, group, index)
                found |= {key: (keys[-1], position, len(keys)) for position, key in enumerate(keys)}
        return found

    def is_cheaper(self, sources: Sequence[Source], computing_ns: int | None) -> bool:
        return self.fetch_cost.is_cheaper(len({source for source, _, _ in sources}), computing_ns)

    def forget(self, request_id: int) -> None:
        self.lookups.pop(request_id, None)
        super().forget(request_id)

    @property
    def is_awaited(self) -> bool:
        return super().is_awaited or any(lookup.is_pending for lookup in self.lookups.values())

    def expire(self, now_ns: int) -> None:
        """See `Tier.expire`. After a missed deadline the store is paused."""
        is_late = self.fetches.expire(now_ns)
        for lookup in self.lookups.values():
            if lookup.is_pending and lookup.deadline_ns is not None and lookup.deadline_ns < now_ns:
                lookup.is_pending, is_late = False, True
        if is_late:
            self._paused_until_ns = now_ns + PAUSE_NS
        self.is_paused = now_ns < self._paused_until_ns

    # --- messages ---

    def complete(self, requests: KvTierRequests, now_ns: int) -> None:
        """Add the searches that fit a message; the next message follows after the results of this one."""
        number, num_names = 0, 0
        while number < len(self._searches) and num_names < MAX_NAMES:
            num_names += sum(map(len, self._searches[number].chains))
            number += 1
        requests.searches, self._searches = self._searches[:number], self._searches[number:]
        for search in requests.searches:
            lookup = self.lookups.get(search.request_id)
            if lookup is not None and lookup.is_pending:
                lookup.deadline_ns = now_ns + FETCH_TIMEOUT_NS

    def apply(self, results: KvTierResults) -> None:
        for found in results.found:
            self._note_found(found.request_id, unpack_i32(found.counts))
        if results.num_searches:
            self.search_cost.note(results.num_searches, results.search_ns)
        super().apply(results)

    def note_stored(self, results: KvTierResults) -> None:
        for name in (*results.stored, *results.unstored):
            self.storing.pop(name, None)
        for name in results.stored:
            self.mark_present(name)

    def note_lost(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.known.pop(name, None)

    def _note_found(self, request_id: int, counts: Sequence[int]) -> None:
        lookup = self.lookups.get(request_id)
        if lookup is None or not lookup.is_pending:
            return
        lookup.is_pending = False
        for chain, count in zip(lookup.chains, counts, strict=True):
            for name in chain[:count]:
                self.mark_present(name)

    def check(self, waiting: set[int]) -> None:
        assert waiting.issuperset(self.lookups), (waiting, list(self.lookups))
        assert self.storing.keys().isdisjoint(self.due), "queued and being stored"
        super().check(waiting)
