"""Blocks of other servers: what this one offers them, and what waiting requests fetch from them.

What is offered is copied out of the device at once, and then the executor's: it keeps the copies for a while, for whoever asks
for them by their keys (`quintet.executor.kv_transfer.peers`). So an offer holds no block, and outlives this process.

What is fetched comes to host blocks of its own (`quintet.core.kv.prefetch`). Never wrong: a key names the content, and the
executor takes it only from who computes the same bits. What does not come is a miss: the request computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.core.kv.prefetch import Prefetches
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_disk import KvTierRequests, KvTierResults, Pull


class PeerPool:
    """What goes out, and what is on its way here: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = ("_due", "_next", "_ordered", "fetches")

    def __init__(self, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks: those that contents are fetched into, consecutive numbers."""
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self._next: tuple[tuple[int, int], int] | None = None
        """Rank and request: who has the next room, of those that found none."""
        self._due: dict[bytes, int] = {}
        """Content -> the device block to offer it from, of what was not ordered yet."""
        self._ordered: dict[str, list[tuple[int, bytes]]] = {}
        """Peer -> host blocks and contents to fetch from it, of what was not ordered yet."""

    def offer(self, contents: Mapping[bytes, int]) -> None:
        """Have these contents copied out of their device blocks, before the next plan."""
        self._due.update(contents)

    def leave(self, key: bytes, block: int) -> None:
        """See `Tier.leave`: what is not ordered by now is not offered."""
        self._due.pop(key, None)

    def may_ask(self, rank: tuple[int, int]) -> bool:
        """Return whether nobody before this rank waits for room: who wants little always finds some, who wants much never."""
        return self._next is None or rank <= self._next[0]

    def ask(
        self,
        request_id: int,
        rank: tuple[int, int],
        peer: str,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        whole: bool,
    ) -> bool:
        """Fetch these contents from a peer, ``host:port``, for a request that may ask: see `Prefetches.ask`.

        Return whether there was room; if not, the next is the request's.
        """
        new = self.fetches.ask(request_id, keys, num_tokens, whole=whole)
        self._next = (rank, request_id) if new is None else None
        if new is None:
            return False
        if new:
            self._ordered.setdefault(peer, []).extend(new)
        return True

    def fetch(self, request_id: int, keys: Sequence[bytes]) -> list[int] | None:
        """See `Tier.fetch`."""
        return self.fetches.fetch(request_id, keys)

    def forget(self, request_id: int) -> None:
        """See `Tier.forget`."""
        self.fetches.forget(request_id)
        if self._next is not None and self._next[1] == request_id:
            self._next = None

    def expire(self, now_ns: int) -> None:
        """Give up what was fetched for too long."""
        self.fetches.expire(now_ns)

    def add_orders(self, orders: KvTierRequests, now_ns: int) -> None:
        """Add what is to be done: before the next plan is made."""
        self.fetches.begin_orders(now_ns)
        orders.offers = pack_i32(self._due.values())
        orders.offer_keys += self._due
        for peer, wanted in self._ordered.items():
            orders.pulls.append(
                Pull(peer, pack_i32(block for block, _ in wanted), [key for _, key in wanted])
            )
        self._due.clear()
        self._ordered.clear()

    def answer(self, answers: KvTierResults) -> None:
        """Apply what became of orders."""
        self.fetches.settle(unpack_i32(answers.pulled), missed=False)
        self.fetches.settle(unpack_i32(answers.lacking), missed=True)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: nothing is copied this way."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        assert self._next is None or self._next[1] in waiting, self._next
        self.fetches.check(waiting)
