"""Host memory for blocks of all ranks: each has room for its own share of them."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.executor.features.kv_offload import HostBlocks
from quintet.executor.parallel.library import OrderKind
from quintet.executor.parallel.ranks import PAIR_BYTES, Ranks


class HostBlocksOfAllRanks:
    """The `HostBlocks` of rank 0, which has the others copy theirs at the same time."""

    def __init__(self, own: HostBlocks, tellers: Sequence[Ranks]) -> None:
        """tellers: by which this rank tells others: those of its stage, and the next stage."""
        self._own = own
        self._tellers = tellers
        self.num_blocks = own.num_blocks

    def copy_out(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_out`."""
        for teller in self._tellers:
            teller.tell_mail(OrderKind.SWAP_OUT, pairs, PAIR_BYTES)
        self._own.copy_out(pairs)

    def copy_in(self, pairs: bytes) -> None:
        """See `HostBlocks.copy_in`."""
        for teller in self._tellers:
            teller.tell_mail(OrderKind.SWAP_IN, pairs, PAIR_BYTES)
        self._own.copy_in(pairs)

    def measure(self) -> int:
        """Return bytes per second, of rank 0's share alone."""
        return self._own.measure()
