"""Blocks in a store that other servers share: what goes there, and what waiting requests look for and fetch from there.

Who else writes to it, and what gives way there, this process does not hear. So a request's runs
(`quintet.core.kv.store_chunks`) are looked for first; what was found, or kept by this engine, is believed to be there
until it is missed::

      request ── search ──▶ found ── is it worth it? ──▶ get ──▶ host block ── a plan ──▶ device block
                                                          │ missed: computed, and kept anew

What is to be kept waits on the device, as long as the prefix cache has it; only so much of it is copied to the host at once.

Never wrong: a key names the content, and the executor takes nothing else under it
(`quintet.executor.kv_transfer.store.chunk_format`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from quintet.core.kv.fetch_cost import FetchCost
from quintet.core.kv.prefetch import PATIENCE_NS, Prefetches
from quintet.core.kv.store_chunks import StoreChunks
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_store import Get, Put, Search, StoreRequests, StoreResults

MAX_KNOWN = 1 << 18
"""StoreChunks that are believed to be there."""
MAX_DUE = 1 << 14
"""StoreChunks that wait on the device to be kept."""
MAX_NAMES = 1 << 16
"""Looked for by one message, and one request's more: what a message may hold is bounded."""
SILENCE_NS = 30_000_000_000
"""How long nobody asks a store that has not answered in time."""


@dataclass(slots=True)
class Lookup:
    """What a waiting request looks for."""

    chains: list[list[bytes]]
    """Names of all its runs, by group."""
    counts: list[int]
    """Of each chain, how many of the first are known to be there."""
    is_pending: bool
    deadline_ns: int | None = None
    """When it is given up; None before it was ordered."""


class StorePool:
    """What is known of a shared store, and what is on its way to and fro: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = (
        "_asked",
        "_due",
        "_most_putting",
        "_num_putting",
        "_ordered",
        "_putting",
        "_silent_until_ns",
        "fetches",
        "get_cost",
        "is_silent",
        "known",
        "lookups",
        "runs",
        "search_cost",
    )

    def __init__(
        self, runs: StoreChunks, first_host_block: int, num_host_blocks: int, most_putting: int
    ) -> None:
        """Host blocks: those that contents are fetched into, consecutive numbers. most_putting: blocks on their way to the
        store at once, and a run more."""
        self.runs = runs
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self.known: dict[bytes, None] = {}
        """Names of runs that are believed to be there, used longest ago first."""
        self.lookups: dict[int, Lookup] = {}
        """By request."""
        self.get_cost, self.search_cost = FetchCost(), FetchCost()
        """Of a run; of a search."""
        self._asked: list[Search] = []
        """What was not ordered yet."""
        self._ordered: dict[bytes, Get] = {}
        """By name, what was not ordered yet."""
        self._due: dict[bytes, list[bytes]] = {}
        """Name -> keys of the blocks, of what is to be kept and was not ordered yet."""
        self._putting: dict[bytes, int] = {}
        """Name -> number of blocks, of what is on its way there."""
        self._num_putting = 0
        self._most_putting = most_putting
        self.is_silent = False
        """Whether the store did not answer in time, a while ago: nobody asks it."""
        self._silent_until_ns = 0

    # --- keeping ---

    def stand(self, digests: Sequence[bytes], first: int, end: int) -> None:
        """Hear that a request's blocks of tokens from ``first`` up to ``end`` have become findable; digests: of all before
        ``end``. Every run that ends among them is kept, unless it is there."""
        length = self.runs.num_blocks
        for index in range(first // length, end // length):
            for group in self.runs.groups.tokens:
                self._keep(self.runs.keys(digests, group, index))

    def stand_state(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """Hear that the states behind so many of a request's blocks have become findable."""
        index, rest = divmod(num_blocks, self.runs.every)
        if index and not rest:
            for group in self.runs.groups.states:
                self._keep(self.runs.keys(digests, group, index - 1))

    def _keep(self, keys: list[bytes]) -> None:
        name = keys[-1]
        if name in self.known:
            self._know(name)
        elif name not in self._putting:
            self._due[name] = keys
            if len(self._due) > MAX_DUE:
                del self._due[next(iter(self._due))]

    def _know(self, name: bytes) -> None:
        self.known.pop(name, None)
        self.known[name] = None
        if len(self.known) > MAX_KNOWN:
            del self.known[next(iter(self.known))]

    def leave(self, key: bytes, block: int) -> None:
        """See `Tier.leave`: whether all blocks of a run are there is seen when it is ordered."""

    # --- fetching ---

    def look_up(self, request_id: int, digests: Sequence[bytes]) -> None:
        """Look for the runs of a waiting request that are not known to be there. digests: of the blocks it could begin behind."""
        chains = self.runs.chains(digests)
        counts = [len(list(takewhile(self.known.__contains__, chain))) for chain in chains]
        unknown = [chain[count:] for chain, count in zip(chains, counts, strict=True)]
        self.lookups[request_id] = Lookup(chains, counts, is_pending=any(unknown))
        if any(unknown):
            self._asked.append(Search(request_id, unknown))

    def places(self, request_id: int, digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, int, int]]:
        """Return what was found for a request: key -> the run that has it, at which position, of how many."""
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
        """Fetch these contents, which are at these places, for a request: see `Prefetches.ask`. Return whether any is fetched."""
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
        """Whether somebody waits for what is on its way, or looked for."""
        return self.fetches.is_awaited or any(lookup.is_pending for lookup in self.lookups.values())

    def expire(self, now_ns: int) -> None:
        """Give up what was looked for, or fetched, for too long; ask nothing more for a while."""
        is_late = self.fetches.expire(now_ns)
        for lookup in self.lookups.values():
            if lookup.is_pending and lookup.deadline_ns is not None and lookup.deadline_ns < now_ns:
                lookup.is_pending, is_late = False, True
        if is_late:
            self._silent_until_ns = now_ns + SILENCE_NS
        self.is_silent = now_ns < self._silent_until_ns

    # --- orders and answers ---

    def orders(self, block_of: Mapping[bytes, int], now_ns: int) -> StoreRequests | None:
        """Return what is to be done before the next plan is made, if anything. block_of: what the device has, by its keys."""
        self.fetches.begin_orders(now_ns)
        orders = StoreRequests(searches=self._take_asked(), gets=[*self._ordered.values()])
        self._ordered.clear()
        for search in orders.searches:
            lookup = self.lookups.get(search.request_id)
            if lookup is not None and lookup.is_pending:
                lookup.deadline_ns = now_ns + PATIENCE_NS
        while self._due and self._num_putting < self._most_putting:
            name = next(iter(self._due))
            keys = self._due.pop(name)
            blocks = [block_of[key] for key in keys if key in block_of]
            if len(blocks) == len(keys):  # else some gave way to others
                self._putting[name] = len(blocks)
                self._num_putting += len(blocks)
                orders.puts.append(Put(pack_i32(blocks), keys))
        return None if orders.is_empty else orders

    def _take_asked(self) -> list[Search]:
        """Return as many searches as fit a message; the next one is sent when something has become of these."""
        number, num_names = 0, 0
        while number < len(self._asked) and num_names < MAX_NAMES:
            num_names += sum(map(len, self._asked[number].chains))
            number += 1
        taken, self._asked = self._asked[:number], self._asked[number:]
        return taken

    def answer(self, answers: StoreResults) -> None:
        """Apply what became of orders."""
        for name in (*answers.kept, *answers.unkept):
            self._num_putting -= self._putting.pop(name, 0)
        for name in answers.kept:
            self._know(name)
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
                self._know(name)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: nothing is copied this way."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        assert waiting.issuperset(self.lookups), (waiting, list(self.lookups))
        assert self._num_putting == sum(self._putting.values()), (self._num_putting, self._putting)
        assert self._putting.keys().isdisjoint(self._due), "kept twice"
        self.fetches.check(waiting)
