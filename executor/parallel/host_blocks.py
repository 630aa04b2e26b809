"""Host memory for blocks of all ranks: each has room for its own share of them."""

from __future__ import annotations

from quintet.executor.features.kv_offload import HostBlocks
from quintet.executor.parallel.library import OrderKind
from quintet.executor.parallel.ranks import PAIR_BYTES, Ranks


class HostBlocksOfAllRanks:
    """The `HostBlocks` of rank 0, which has the others copy theirs at the same time."""

    def __init__(self, own: HostBlocks, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.num_blocks = own.num_blocks

    def copy_out(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_out`."""
        self._ranks.tell_mail(OrderKind.SWAP_OUT, pairs, PAIR_BYTES)
        self._own.copy_out(pairs)

    def copy_in(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_in`."""
        self._ranks.tell_mail(OrderKind.SWAP_IN, pairs, PAIR_BYTES)
        self._own.copy_in(pairs)

    def measure(self) -> int:
        """Return bytes per second, of rank 0's share alone."""
        return self._own.measure()
