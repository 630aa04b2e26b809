"""Store tier: KV blocks in a store shared with other servers.

This process is not notified of other writers or of evictions. So the store is searched for a request's chunks first
(`StoreChunks`). Chunks found, or stored by this engine, are assumed present until a read misses:

      request ── search ──▶ found ── is it cheaper? ──▶ get ──▶ host block ── a plan ──▶ device block
                                                          │ missed: computed, and stored again

Blocks to store wait on the device while they are cached; the bytes copied to the host at once are bounded.

A key names the exact content, and the executor verifies it (`quintet.executor.kv_transfer.store.chunk_format`).

Chunks are the objects of the store. A chunk of a token group holds consecutive blocks. A chunk of a state group holds
one state, of those after every so many blocks:

    blocks of a group   | 0 … 15 | 16 … 31 | 32 … 47 | 48 …      chunks of 16 blocks of 16 tokens
    name: key of block         15        31        47
    states                                           64          one after every 64 blocks

One object per block would be small: an object store takes as long to start a request as to transfer a megabyte. One
per prompt could not be shared. The chunk size follows from the block size alone, so all servers agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS, FetchCost, Prefetches
from quintet.core.kv.prefix import key_of
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import Get, Put, Search, StoreRequests, StoreResults

RUN_TOKENS = 256
"""Maximum tokens of a chunk, at least one block: 3 MB for a model of 0.5 billion parameters, 32 MB for 8 billion."""


@dataclass(slots=True, frozen=True)
class StoreChunks:
    """Chunk layout of one model."""

    groups: Groups
    num_blocks: int
    """Blocks per chunk of a token group."""
    every: int
    """Blocks between stored states: a multiple of ``num_blocks``."""

    @classmethod
    def of(cls, groups: Groups, block_size: int, checkpoint_every: int) -> StoreChunks:
        """Return the layout for this block size. checkpoint_every: tokens between states, rounded up to blocks."""
        every = -(-checkpoint_every // block_size)
        most = max(1, RUN_TOKENS // block_size)
        return cls(groups, max(size for size in range(1, min(most, every) + 1) if every % size == 0), every)

    def length(self, group: int) -> int:
        """Return the number of blocks per name of a group."""
        return self.every if self.groups.all[group].is_state else self.num_blocks

    def chains(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return, per group, the names of all chunks of these blocks, in token order."""
        return [
            [key_of(digest, group) for digest in digests[self.length(group) - 1 :: self.length(group)]]
            for group in range(len(self.groups.all))
        ]

    def keys(self, digests: Sequence[bytes], group: int, index: int) -> list[bytes]:
        """Return the keys of the blocks of a group's chunk; the last one is its name."""
        end = (index + 1) * self.length(group)
        begin = end - 1 if self.groups.all[group].is_state else end - self.num_blocks
        return [key_of(digest, group) for digest in digests[begin:end]]


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
    """Names of all its chunks, by group."""
    counts: list[int]
    """Per chain, the number of leading chunks that are present."""
    is_pending: bool
    deadline_ns: int | None = None
    """Time at which it is given up; None before it was sent."""


class StorePool:
    """Chunks assumed present, and transfers in progress: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = (
        "_due",
        "_max_putting",
        "_num_putting",
        "_ordered",
        "_paused_until_ns",
        "_putting",
        "_searches",
        "fetches",
        "get_cost",
        "is_paused",
        "known",
        "lookups",
        "runs",
        "search_cost",
    )

    def __init__(
        self, runs: StoreChunks, first_host_block: int, num_host_blocks: int, max_putting: int
    ) -> None:
        """Host blocks are numbered consecutively; fetches are written into them. max_putting: maximum blocks being
        stored, plus one chunk.
        """
        self.runs = runs
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self.known: dict[bytes, None] = {}
        """Names of chunks assumed present, least recently used first."""
        self.lookups: dict[int, Lookup] = {}
        """Keyed by request."""
        self.get_cost, self.search_cost = FetchCost(), FetchCost()
        """Per chunk; per search."""
        self._searches: list[Search] = []
        """Searches not sent yet."""
        self._ordered: dict[bytes, Get] = {}
        """Gets not sent yet, by name."""
        self._due: dict[bytes, list[bytes]] = {}
        """Name -> block keys of chunks to store; not sent yet."""
        self._putting: dict[bytes, int] = {}
        """Name -> number of blocks, of chunks being stored."""
        self._num_putting = 0
        self._max_putting = max_putting
        self.is_paused = False
        """The store missed a deadline recently and gets no requests."""
        self._paused_until_ns = 0

    # --- storing ---

    def queue_chunks(self, digests: Sequence[bytes], first: int, end: int) -> None:
        """Queue the chunks completed by the request's token blocks ``first`` to ``end``, unless they are present.

        digests: of all blocks before ``end``.
        """
        length = self.runs.num_blocks
        for index in range(first // length, end // length):
            for group in self.runs.groups.tokens:
                self._queue_chunk(self.runs.keys(digests, group, index))

    def queue_state(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """Queue the states after the first ``num_blocks`` blocks of a request."""
        index, rest = divmod(num_blocks, self.runs.every)
        if index and not rest:
            for group in self.runs.groups.states:
                self._queue_chunk(self.runs.keys(digests, group, index - 1))

    def _queue_chunk(self, keys: list[bytes]) -> None:
        name = keys[-1]
        if name in self.known:
            self._mark_present(name)
        elif name not in self._putting:
            self._due[name] = keys
            if len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def _mark_present(self, name: bytes) -> None:
        self.known.pop(name, None)
        self.known[name] = None
        if len(self.known) > MAX_KNOWN:
            del self.known[next(iter(self.known))]

    def on_evict(self, key: bytes, block: int) -> None:
        """See `Tier.on_evict`: completeness is checked when the put is sent."""

    # --- fetching ---

    def look_up(self, request_id: int, digests: Sequence[bytes]) -> None:
        """Search for chunks that are not known to be present. digests: of the blocks after which the request could start."""
        chains = self.runs.chains(digests)
        counts = [len(list(takewhile(self.known.__contains__, chain))) for chain in chains]
        unknown = [chain[count:] for chain, count in zip(chains, counts, strict=True)]
        self.lookups[request_id] = Lookup(chains, counts, is_pending=any(unknown))
        if any(unknown):
            self._searches.append(Search(request_id, unknown))

    def places(self, request_id: int, digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, int, int]]:
        """Return the search result: block key -> chunk name, position in the chunk, blocks in the chunk."""
        found: dict[bytes, tuple[bytes, int, int]] = {}
        lookup = self.lookups[request_id]
        for group, count in enumerate(lookup.counts):
            for index in range(count):
                keys = self.runs.keys(digests, group, index)
                found |= {key: (keys[-1], position, len(keys)) for position, key in enumerate(keys)}
        return found

    def ask(
        self,
        request_id: int,
        keys: Sequence[bytes],
        places: Mapping[bytes, tuple[bytes, int, int]],
        num_tokens: int,
        *,
        whole: bool,
    ) -> bool:
        """Fetch contents at ``places`` for a request: see `Prefetches.ask`. Return True when any is fetched."""
        new = self.fetches.ask(request_id, keys, num_tokens, whole=whole)
        if new is None:
            return False
        for block, key in new:
            name, position, num_blocks = places[key]
            get = self._ordered.setdefault(name, Get(name, num_blocks, b"", b"", []))
            get.positions += pack_i32([position])
            get.host_blocks += pack_i32([block])
            get.keys.append(key)
        return True

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """See `Tier.fetch`."""
        return self.fetches.fetch(request_id, keys)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        self.lookups.pop(request_id, None)
        self.fetches.forget(request_id)

    @property
    def is_awaited(self) -> bool:
        """True while a request waits for a search or a fetch."""
        return self.fetches.is_awaited or any(lookup.is_pending for lookup in self.lookups.values())

    def expire(self, now_ns: int) -> None:
        """Give up searches and fetches past their deadline; then pause requests to the store."""
        is_late = self.fetches.expire(now_ns)
        for lookup in self.lookups.values():
            if lookup.is_pending and lookup.deadline_ns is not None and lookup.deadline_ns < now_ns:
                lookup.is_pending, is_late = False, True
        if is_late:
            self._paused_until_ns = now_ns + PAUSE_NS
        self.is_paused = now_ns < self._paused_until_ns

    # --- requests and results ---

    def orders(self, block_of: Mapping[bytes, int], now_ns: int) -> StoreRequests | None:
        """Return the transfers to send before the next plan, or None. block_of: device blocks by key."""
        self.fetches.begin_orders(now_ns)
        orders = StoreRequests(searches=self._take_searches(), gets=[*self._ordered.values()])
        self._ordered.clear()
        for search in orders.searches:
            lookup = self.lookups.get(search.request_id)
            if lookup is not None and lookup.is_pending:
                lookup.deadline_ns = now_ns + FETCH_TIMEOUT_NS
        while self._due and self._num_putting < self._max_putting:
            name = next(iter(self._due))
            keys = self._due.pop(name)
            blocks = [block_of[key] for key in keys if key in block_of]
            if len(blocks) == len(keys):  # otherwise some were evicted
                self._putting[name] = len(blocks)
                self._num_putting += len(blocks)
                orders.puts.append(Put(pack_i32(blocks), keys))
        return None if orders.is_empty else orders

    def _take_searches(self) -> list[Search]:
        """Return the searches that fit a message; the next message follows after the results of this one."""
        number, num_names = 0, 0
        while number < len(self._searches) and num_names < MAX_NAMES:
            num_names += sum(map(len, self._searches[number].chains))
            number += 1
        taken, self._searches = self._searches[:number], self._searches[number:]
        return taken

    def answer(self, answers: StoreResults) -> None:
        """Apply the results of transfers."""
        for name in (*answers.kept, *answers.unkept):
            self._num_putting -= self._putting.pop(name, 0)
        for name in answers.kept:
            self._mark_present(name)
        for found in answers.found:
            self._note_found(found.request_id, unpack_i32(found.counts))
        self.fetches.settle(unpack_i32(answers.fetched), missed=False)
        self.fetches.settle(unpack_i32(answers.missed), missed=True)
        for name in answers.lost:
            self.known.pop(name, None)
        if answers.num_gets:
            self.get_cost.note(answers.num_gets, answers.get_ns)
        if answers.num_searches:
            self.search_cost.note(answers.num_searches, answers.search_ns)

    def _note_found(self, request_id: int, counts: Sequence[int]) -> None:
        lookup = self.lookups.get(request_id)
        if lookup is None or not lookup.is_pending or len(counts) != len(lookup.chains):
            return
        lookup.is_pending = False
        for group, (chain, count) in enumerate(zip(lookup.chains, counts, strict=True)):
            known = lookup.counts[group]
            lookup.counts[group] = min(len(chain), known + count)
            for name in chain[known : lookup.counts[group]]:
                self._mark_present(name)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: this tier has none."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        assert waiting.issuperset(self.lookups), (waiting, list(self.lookups))
        assert self._num_putting == sum(self._putting.values()), (self._num_putting, self._putting)
        assert self._putting.keys().isdisjoint(self._due), "queued and being stored"
        self.fetches.check(waiting)
