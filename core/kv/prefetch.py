"""Prefetches from slow tiers: contents that waiting requests want, and the host blocks that receive them.

A request's fetch is *pending* until the executor has reported all its blocks. The plan that admits the request copies
them to the device. A host block being written is not reused before that report, even if no request wants it any more:

      free ──── ask ───▶ awaited ──── reported ───▶ holds a content ──── no longer wanted ───▶ free

`quintet.core.kv.tier` and its subclasses know the sources and costs.

`FetchCost` compares the measured cost of fetching with computing. Callers pass durations; it reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quintet.core.kv.host_pool import HostPool
from quintet.core.kv.prefix import run_of

FETCH_TIMEOUT_NS = 10_000_000_000
"""Timeout of a fetch without progress in it or an earlier one: a process hangs, or a result was lost."""
MAX_FETCH_NS = 60_000_000_000
"""Absolute timeout of a fetch, despite progress."""


@dataclass(slots=True)
class FetchRequest:
    """Fetch of a waiting request, created after its lookup; possibly empty."""

    num_tokens: int = 0
    """Number of tokens after which the request can start once all blocks have arrived."""
    pending: set[bytes] = field(default_factory=set)
    last: int = 0
    """Sequence number of the newest fetch among ``pending``."""
    deadline_ns: int | None = None
    """Time at which the fetch is given up; None until the next transfer requests."""
    last_deadline_ns: int | None = None
    """Upper bound of ``deadline_ns``; None until the next transfer requests."""


class Prefetches:
    """Fetches per request, and the transfers in progress."""

    __slots__ = ("_awaited", "_num_requested", "_untimed", "host_blocks", "requests")

    def __init__(self, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks are numbered consecutively from ``first_host_block``; fetches are written into them."""
        self.host_blocks = HostPool(num_host_blocks, first_host_block)
        self.requests: dict[int, FetchRequest] = {}
        """Keyed by request."""
        self._awaited: dict[int, tuple[int, bytes]] = {}
        """Host block -> sequence number of its fetch, and key; results arrive in about this order."""
        self._num_requested = 0
        self._untimed: list[FetchRequest] = []
        """Fetches with a timeout that starts at the next transfer requests."""

    def ask(
        self, request_id: int, keys: Sequence[bytes], num_tokens: int, *, whole: bool
    ) -> list[tuple[int, bytes]] | None:
        """Fetch contents for a request: as many of the first as free host blocks allow; ``whole``: all or none.

        Return the host blocks and keys to request. Return None, without a fetch, when host blocks are short.
        """
        wanted = self.host_blocks.want(request_id, keys, whole=whole)
        if not wanted:
            return None
        new: list[tuple[int, bytes]] = []
        block_of = self.host_blocks.block_of
        for key in wanted:
            if key not in block_of:
                block = self.host_blocks.place(key)
                self._num_requested += 1
                self._awaited[block] = self._num_requested, key
                new.append((block, key))
        awaited = [self._awaited[block_of[key]] for key in wanted if block_of[key] in self._awaited]
        last, _ = max(awaited, default=(0, b""))
        self.requests[request_id] = fetch = FetchRequest(num_tokens, {key for _, key in awaited}, last)
        self._untimed.append(fetch)
        return new

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """Return the host blocks of the longest available prefix of a request's wanted keys; None while pending."""
        fetch = self.requests.get(request_id)
        if fetch is None:
            return []
        if fetch.pending:
            return None
        blocks = run_of(keys, self.host_blocks.block_of)
        return list(takewhile(lambda block: block not in self._awaited, blocks))

    def forget(self, request_id: int) -> None:
        """See `quintet.core.kv.tier.Tier.forget`."""
        self.requests.pop(request_id, None)
        self.host_blocks.forget(request_id)

    def begin_requests(self, now_ns: int) -> None:
        """Start the timeouts of fetches that are requested now, and free host blocks that the previous plan has read."""
        self.free_left()
        for fetch in self._untimed:
            if fetch.last_deadline_ns is None:
                fetch.last_deadline_ns = now_ns + MAX_FETCH_NS
            fetch.deadline_ns = min(now_ns + FETCH_TIMEOUT_NS, fetch.last_deadline_ns)
        self._untimed.clear()

    def expire(self, now_ns: int) -> bool:
        """Give up fetches past their deadline; their requests compute. Return True when there were any."""
        is_late = False
        for request_id, fetch in self.requests.items():
            if fetch.pending and fetch.deadline_ns is not None and now_ns > fetch.deadline_ns:
                is_late = True
                fetch.pending.clear()
                self.host_blocks.forget(request_id)
        return is_late

    def settle(self, blocks: Sequence[int], *, missed: bool) -> list[bytes]:
        """Apply results: these host blocks hold their content, or missed it. Return the keys that were awaited."""
        newest = max((self._awaited[block][0] for block in blocks if block in self._awaited), default=0)
        if newest:
            later = [fetch for fetch in self.requests.values() if fetch.pending and fetch.last >= newest]
            for fetch in later:
                fetch.deadline_ns = None
            self._untimed += later
        settled: list[bytes] = []
        known: list[bytes] = []
        for block in blocks:
            if block not in self._awaited:
                continue
            _, key = self._awaited.pop(block)
            settled.append(key)
            # Otherwise no request wants it any more, or it was requested again.
            if self.host_blocks.block_of.get(key) == block:
                known.append(key)
        if missed:
            self.host_blocks.lose(known)
        for fetch in self.requests.values():
            if fetch.pending:
                fetch.pending.difference_update(known)
        return settled

    @property
    def is_awaited(self) -> bool:
        """True while a request waits for a fetch."""
        return any(fetch.pending for fetch in self.requests.values())

    @property
    def frees_host_blocks(self) -> bool:
        """True when more host blocks will be free: a request enters from its fetched blocks, or just did."""
        return bool(self.host_blocks.keys_of) or any(
            block not in self._awaited for block in self.host_blocks.leaving
        )

    def free_left(self) -> None:
        """Free host blocks that the previous plan has read and no fetch writes."""
        leaving = self.host_blocks.leaving
        self.host_blocks.free += (block for block in leaving if block not in self._awaited)
        self.host_blocks.leaving = [block for block in leaving if block in self._awaited]

    def check(self, waiting: set[int]) -> None:
        """See `quintet.core.kv.tier.Tier.check`."""
        self.host_blocks.check(waiting)
        assert self._awaited.keys() <= {*self.host_blocks.block_of.values(), *self.host_blocks.leaving}, (
            self._awaited
        )
        assert waiting.issuperset(self.requests), (waiting, list(self.requests))
        for fetch in self.requests.values():
            assert fetch.pending <= self.host_blocks.block_of.keys(), "pending without a fetch"


OUTLIER_FACTOR = 8
"""Outlier limit: a sample counts at most this multiple of the mean, because a fetch may have been suspended."""
TRY_EVERY = 32
"""After this many rejected fetches the measurement is discarded, because fetching may be faster now."""


@dataclass(slots=True)
class FetchCost:
    """Exponential moving average of the time of one fetch."""

    each_ns: float | None = None
    """None before the first measurement."""
    _num_rejected: int = 0

    def note(self, number: int, took_ns: int) -> None:
        """Add a measurement: ``number`` (at least 1) fetches took ``took_ns`` together."""
        each_ns = took_ns / number
        old_ns = each_ns if self.each_ns is None else self.each_ns
        self.each_ns = (3 * old_ns + min(each_ns, OUTLIER_FACTOR * old_ns)) / 4

    def is_cheaper(self, number: int, computing_ns: int | None) -> bool:
        """Return True when the fetches take less time than computing, or nothing is measured yet."""
        if computing_ns is None or self.each_ns is None or number * self.each_ns < computing_ns:
            return True
        self._num_rejected += 1
        if self._num_rejected % TRY_EVERY == 0:
            self.each_ns = None
        return self.each_ns is None
