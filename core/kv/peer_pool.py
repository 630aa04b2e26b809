"""KV exchange with other servers: blocks offered to them, and blocks that waiting requests fetch.

Offered blocks are copied from the device at once. The executor keeps the copies for a while and serves them by key
(`quintet.executor.kv_transfer.peers`). So an offer holds no block and outlives this process.

Fetched blocks arrive in separate host blocks (`quintet.core.kv.prefetch`). A key names the exact content, and the
executor accepts it only from a peer that computes the same bits. A missing block is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.core.kv.prefetch import Prefetches
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, Pull


class PeerPool:
    """Offers and fetches in progress: a `quintet.core.kv.tiers.Tier`."""

    __slots__ = ("_due", "_next", "_ordered", "fetches")

    def __init__(self, first_host_block: int, num_host_blocks: int) -> None:
        """Host blocks are numbered consecutively from ``first_host_block``; fetches are written into them."""
        self.fetches = Prefetches(first_host_block, num_host_blocks)
        self._next: tuple[tuple[int, int], int] | None = None
        """Rank and id of the request that gets the next free host blocks."""
        self._due: dict[bytes, int] = {}
        """Block key -> device block to offer; not sent yet."""
        self._ordered: dict[str, list[tuple[int, bytes]]] = {}
        """Peer -> host blocks and keys to fetch; not sent yet."""

    def offer(self, contents: Mapping[bytes, int]) -> None:
        """Offer these contents: copy them from their device blocks before the next plan."""
        self._due.update(contents)

    def on_evict(self, key: bytes, block: int) -> None:
        """See `Tier.on_evict`: an offer that was not sent yet is dropped."""
        self._due.pop(key, None)

    def may_ask(self, rank: tuple[int, int]) -> bool:
        """Return True when no request before it by rank waits for host blocks. Otherwise small requests would starve
        large ones.
        """
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
        """Fetch contents from a peer ``host:port``; requires `may_ask`. See `Prefetches.ask`.

        Return False when host blocks were short; then the request gets the next free ones.
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
        """Give up fetches past their deadline."""
        self.fetches.expire(now_ns)

    def add_orders(self, orders: KvTierRequests, now_ns: int) -> None:
        """Add the transfers to send before the next plan."""
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
        """Apply the results of transfers."""
        self.fetches.settle(unpack_i32(answers.pulled), missed=False)
        self.fetches.settle(unpack_i32(answers.lacking), missed=True)

    def take_copies(self) -> list[int]:
        """See `Tier.take_copies`: this tier has none."""
        self.fetches.free_left()
        return []

    def check(self, waiting: set[int]) -> None:
        """See `Tier.check`."""
        assert self._next is None or self._next[1] in waiting, self._next
        self.fetches.check(waiting)
