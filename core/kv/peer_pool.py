"""Peer back end, core half: blocks offered to other servers, and blocks that waiting requests fetch from them.

A prompt's blocks are offered when its request has ended, and copied from the device at once. The executor keeps the
copies for a while and serves them by key (`quintet.executor.kv_transfer.peers`). So an offer holds no block and outlives
this process.

The sender of a request names the peer and its number of blocks; there is no lookup and no comparison with computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.core.kv.tier import Source, Tier, Wanted


class PeerPool(Tier):
    """Offers, and the queue for host blocks."""

    name = "peer"
    does_wait = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next: tuple[tuple[int, int], int] | None = None
        """Rank and id of the request that gets the next free host blocks."""
        self._num_free = 0
        """Free host blocks when that request was refused."""
        self._refused: set[int] = set()
        """Requests that wait for host blocks."""

    def offer(self, keys: Sequence[bytes]) -> None:
        self.due |= {key: [key] for key in keys}

    def max_blocks(self, wanted: Wanted) -> int:
        return min(wanted.num_blocks, wanted.num_offered)

    def stays_queued(self, wanted: Wanted) -> bool:
        if self._next is None or wanted.request_id not in self._refused or not self.fetches.frees_host_blocks:
            return False
        if wanted.request_id == self._next[1]:
            return self.fetches.host_blocks.num_free == self._num_free
        return wanted.rank > self._next[0]

    def look_up(
        self, wanted: Wanted, digests: Sequence[bytes], computing_ns: int | None
    ) -> Mapping[bytes, Source]:
        """See `Tier.look_up`: the sender says that the peer has all blocks."""
        return dict.fromkeys(self.chunks.all_keys(digests), (wanted.peer.encode(), 0, 1))

    def is_cheaper(self, sources: Sequence[Source], computing_ns: int | None) -> bool:
        """Return True: computing here would defeat the purpose of a prefill server."""
        return True

    def fetch(self, wanted: Wanted, sources: Mapping[bytes, Source], num_tokens: int, *, whole: bool) -> bool:
        """See `Tier.fetch`. A request waits behind the first one by rank; otherwise small requests would starve large ones.

        When host blocks are short, the request gets the next free ones.
        """
        self._refused.add(wanted.request_id)
        if self._next is not None and wanted.rank > self._next[0]:
            return False
        is_asked = super().fetch(wanted, sources, num_tokens, whole=whole or self.fetches.frees_host_blocks)
        self._next = None if is_asked else (wanted.rank, wanted.request_id)
        self._num_free = self.fetches.host_blocks.num_free
        if is_asked:
            self._refused.remove(wanted.request_id)
        return is_asked

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._refused.discard(request_id)
        if self._next is not None and self._next[1] == request_id:
            self._next = None

    def check(self, waiting: set[int]) -> None:
        assert self._next is None or self._next[1] in waiting, self._next
        assert waiting.issuperset(self._refused), (waiting, self._refused)
        super().check(waiting)
